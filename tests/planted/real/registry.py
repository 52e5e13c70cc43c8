"""The registry of real bugs: each an entrant of a few lines, under the thread in which its library found it.

A theme is a module of this folder. It plants its bugs in settings (tests/planted/real/settings.py), and says beforehand
which causes would be fair names for each:

    SCALER = Theme("scaler")

    @SCALER.plants("deepspeedai/DeepSpeed/pull/8588", MLP_GROWS, "fp16", fair="gradient scaled")
    class UnscalesByTheNextScale(MasterWeights):
        \"\"\"One sentence on what happens there.\"\"\"
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from mpcompare.contract import Backend
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.task import Task

THEMES = (
    "scaler",
    "masters",
    "clip",
    "accumulation",
    "optimizer",
    "loss",
    "norms",
    "buffers",
    "resume",
    "precision",
    "schedule",
)
LAYERS = ("activations", "attention", "embeddings", "convolutions", "recomputation")  # themes since the fifth draw
CORRECT = "correct"  # the module of entrants that are right, and must not be accused
LATER_DRAWS = {"second_draw": 2, "third_draw": 3, "fourth_draw": 4, "fifth_draw": 5}  # by the names of their tables
PARTS = {"fifth_draw": ("step", "norms", "kernels", "activations", "attention", "losses")}  # the modules of a draw
HOST = "https://github.com/"


@dataclass(frozen=True, eq=False)
class Setting:
    """The training in which a bug shows.

    Attributes:
        name: the name in tables.
        make: returns the task and its data.
        steps: the number of steps that are trained.
        scaling: the loss scale; None: the scale of ``loss_scale=auto``.
    """

    name: str
    make: Callable[[], tuple[Task, Dataset]]
    steps: int = 12
    scaling: LossScale | None = None

    def changed(self, words: str, steps: int = 0, scaling: LossScale | None = None, **task: Any) -> "Setting":
        """Returns the setting with other attributes of its task; ``words`` name them in tables."""

        def make() -> tuple[Task, Dataset]:
            base, dataset = self.make()
            return replace(base, **task), dataset

        return Setting(f"{self.name}, {words}", make, steps or self.steps, scaling or self.scaling)


@dataclass(frozen=True, eq=False)
class RealBug:
    """A bug of another library.

    Attributes:
        id: the library and the number of the thread.
        link: the thread.
        theme: the module that plants it.
        setting, precision: the training in which it shows.
        backend: the entrant that has it.
        fair: the causes that would be fair names for it; none for an entrant that is right.
        read: ``thread``; ``title`` where no more of it was found, ``source`` where there is none and the code was read.
        also: further threads on the same mistake, of this library or of others.
        draw: 2 for bugs that were looked for after the verdict had been mended for the first draw's bugs, 3 for bugs
            that were looked for after it had been mended for both draws, and so on.
    """

    id: str
    link: str
    theme: str
    setting: Setting
    precision: str
    backend: type[Backend]
    fair: tuple[str, ...]
    read: str = "thread"
    also: tuple[str, ...] = ()
    draw: int = 1

    @property
    def correct(self) -> bool:
        """Whether the entrant is right, and must not be accused."""
        return not self.fair

    @property
    def what(self) -> str:
        """The bug in a sentence or two: the docstring of its entrant."""
        return re.sub(r"\s+", " ", (self.backend.__doc__ or "").strip())


REAL: list[RealBug] = []


@dataclass(frozen=True)
class Theme:
    """The bugs of one part of training.

    Attributes:
        name: the name of its module in the first draw.
        draw: the draw of its bugs.
    """

    name: str
    draw: int = 1

    def plants(
        self, path: str, setting: Setting, precision: str, fair: str = "", also: str = "", name: str = "", **rest: Any
    ) -> Callable[[type[Backend]], type[Backend]]:
        """Registers the class that it decorates.

        Args:
            path: the thread, below the address of its host.
            fair, also: the fair causes, and the further threads, with commas between them.
            name: the id, if it is not the repository and the number in ``path``, as ``DeepSpeed#8588``.
            rest: more attributes of :class:`RealBug`.
        """
        _, repository, *_, number = path.split("/")
        told = {"id": name or f"{repository}#{number}", "link": HOST + path, "fair": parts(fair), "also": parts(also)}

        def register(backend: type[Backend]) -> type[Backend]:
            where = {"theme": self.name, "draw": self.draw, "setting": setting, "precision": precision}
            REAL.append(RealBug(backend=backend, **where, **told, **rest))
            return backend

        return register


def parts(text: str) -> tuple[str, ...]:
    """Returns the parts of a text with commas between them; none of an empty one."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def real_bugs(*themes: str) -> list[RealBug]:
    """Returns the entrants of these themes, in the order in which they are planted."""
    for theme in themes:
        import_module(f"planted.real.{theme}")
    return _of_draw(1, themes)


def later_draw(name: str) -> list[RealBug]:
    """Returns the entrants of a draw after the first, theme by theme; those that are right come last."""
    for part in PARTS.get(name, ("scaler", "step", "layers", "resume")):
        import_module(f"planted.real.{name}_{part}")
    return _of_draw(LATER_DRAWS[name], (*THEMES, *LAYERS, CORRECT))


def _of_draw(draw: int, themes: Iterable[str]) -> list[RealBug]:
    return [bug for theme in themes for bug in REAL if bug.theme == theme and bug.draw == draw]
