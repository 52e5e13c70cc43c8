"""The registry of the second draw: real bugs of training loops, each as a loop with the bug and a loop without it.

    @bug("wenet-e2e/wekws#72", "gradients are never cleared", fair="accumulation", kind=DEFECT, precision="bf16")
    def never_cleared(wrong: bool) -> Training:
        ...

The function makes the loop with the bug where ``wrong`` is true, and its right twin otherwise. ``fair`` holds the
causes that would be fair names. ``expect`` holds what the user meant, without the precision. Both were written down
before a watch saw the loops. Two loops did not show their bug at first, and were mended before that, too.

``expect`` has been changed since in two ways. Facts have other names now: ``weights`` is ``micro_batch_weights``, and
``labels`` is ``micro_batch_labels``. The list of voidism/DiffCSE#25 was in another list, so that even the right twin
was refused. It is a plain list now.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from watch.second_draw.networks import cross_entropy

TABLES = Path(__file__).parents[3] / "docs" / "watch"
DEFECT, FACT = "defect", "fact"  # a bug that no intention makes right, and a bug that somebody else may mean


class Training(NamedTuple):
    """A loop. ``train`` makes about so many updates, or a whole number of its epochs."""

    model: nn.Module
    optimizer: Any
    train: Callable[[int], None]


Maker = Callable[[bool], Training]


@dataclass(frozen=True)
class Bug:
    """A real bug.

    Attributes:
        thread: the repository and the number of the issue or pull request on GitHub.
        what: the bug in a sentence.
        fair: the causes that would be fair names for it.
        kind: ``DEFECT`` or ``FACT``, by what its author took it for.
        precision: the precision that the loop means.
        expect: what else the loop's user meant, in the words of the watch's ``expect``.
        make: makes the loop with the bug, or without it.
        steps: the number of watched updates.
    """

    thread: str
    what: str
    fair: tuple[str, ...]
    kind: str
    precision: str
    expect: dict[str, Any]
    make: Maker
    steps: int = 5

    @property
    def id(self) -> str:
        """The thread without its owner."""
        return self.thread.rpartition("/")[2]

    @property
    def link(self) -> str:
        """The address of the thread. GitHub leads from there to the pull request, if the thread is one."""
        return f"https://github.com/{self.thread.replace('#', '/issues/')}"

    @property
    def meant(self) -> dict[str, Any]:
        """All that the loop's user meant, in the words of the watch's ``expect``."""
        return {"precision": self.precision, **self.expect}

    def seeded(self, wrong: bool) -> Training:
        """Returns the loop, made with a seed of its own."""
        torch.manual_seed(0)
        return self.make(wrong)


BUGS: list[Bug] = []


def bug_of(
    bugs: list[Bug],
    thread: str,
    what: str,
    *,
    fair: str,
    kind: str,
    precision: str,
    expect: dict[str, Any] | None = None,
    steps: int = 5,
) -> Callable[[Maker], Maker]:
    """Registers the maker that it decorates in the list of a draw."""
    causes = tuple(sorted(cause.strip() for cause in fair.split(",")))

    def register(make: Maker) -> Maker:
        bugs.append(Bug(thread, what, causes, kind, precision, expect or {}, make, steps))
        return make

    return register


bug = partial(bug_of, BUGS)


def kept(draw: str) -> list[str]:
    """Returns the names of a draw's kept tables: the table that was made blind, and a later watch's table, if any."""
    return [name for name in ("blind", "mended") if (TABLES / f"{draw}_draw_{name}.csv").exists()]


def table(draw: str, name: str) -> dict[str, dict[str, str]]:
    """Returns the rows of a kept table of a draw by their threads."""
    with (TABLES / f"{draw}_draw_{name}.csv").open(newline="") as file:
        return {row["thread"]: row for row in csv.DictReader(file)}


def bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def fp16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def scaler_of(scale: float, **more: Any) -> GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **more)


def plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Callable[[], tuple[Tensor, Tensor]]
) -> Callable[[int], None]:
    """Returns the plain loop in bf16, which makes any number of updates. The bug is in the network or the optimizer."""

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = batch()
            optimizer.zero_grad()
            with bf16():
                loss = cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()

    return train
