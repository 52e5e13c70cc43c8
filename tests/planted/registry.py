"""The registry of planted bugs: small patches of correct backends, each with the cause that the verdict should name.

A family is a module of this folder. It names the training in which its bugs are planted, and plants them:

    CNN = Family("cnn", make, steps=12, precisions=BF16)

    @CNN.plants("running statistics")
    class StaleStatistics(Amp): ...
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor

from mpcompare.contract import Backend
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.task import Task

FAMILIES = ("mlp", "cnn", "lstm", "gpt", "recipe", "trained", "dropout", "groups", "branches", "masked")
BOTH, FP16, BF16 = ("fp16", "bf16"), ("fp16",), ("bf16",)


@dataclass(frozen=True, eq=False)
class Bug:
    """A planted bug.

    Attributes:
        family: the family that it belongs to.
        name: its name in tables.
        backend: the backend that has it.
        cause: the cause that the verdict should name.
        precisions: the precisions in which it is a bug at all.
        task: the changes of the family's task without which it is no bug.
        invisible: why no check can see it at this task; empty if one can.
        batches: the stream of batches that the harness hands to the backend, for a bug of the harness.
    """

    family: "Family"
    name: str
    backend: type[Backend]
    cause: str
    precisions: Sequence[str]
    task: Mapping[str, Any] = field(default_factory=dict)
    invisible: str = ""
    batches: Callable[[Dataset, int], Iterator[tuple[Tensor, Tensor]]] = batches


BUGS: list[Bug] = []


@dataclass(frozen=True)
class Family:
    """Bugs that are planted in one task.

    Attributes:
        name: the name of its module.
        make: returns the task, with changes of it, and its data.
        steps: how many steps are trained.
        precisions: the precisions of a bug that names none of its own.
    """

    name: str
    make: Callable[..., tuple[Task, Dataset]]
    steps: int
    precisions: Sequence[str] = BOTH

    def plants(
        self, cause: str, *, name: str = "", precisions: Sequence[str] = (), **rest: Any
    ) -> Callable[[type[Backend]], type[Backend]]:
        """Registers the class that it decorates as a :class:`Bug`; ``rest`` are more attributes of the bug."""

        def register(backend: type[Backend]) -> type[Backend]:
            bug = Bug(self, name or backend.__name__, backend, cause, precisions or self.precisions, **rest)
            BUGS.append(bug)
            return backend

        return register


def bugs_of(*families: str) -> list[Bug]:
    """Returns the bugs of these families, in the order in which they are planted."""
    for name in families:
        import_module(f"planted.{name}")
    return [bug for name in families for bug in BUGS if bug.family.name == name]
