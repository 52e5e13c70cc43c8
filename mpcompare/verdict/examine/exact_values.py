"""The exact values of a problem, which is a network, a loss and a batch. No backend takes part in them."""

import logging
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpcompare.clean_process import CleanProcess, CleanProcessError
from mpcompare.contract import Batches
from mpcompare.instruments import heap
from mpcompare.shared import ALONE, Shared
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.losses import Loss
from mpcompare.tasks.task import buffers_of, params_of

log = logging.getLogger(__name__)

Lent = Mapping[str, str]  # by name a fingerprint of what is lent to backends


@dataclass(frozen=True)
class Problem:
    """Everything that exact values follow from."""

    network: nn.Module  # the network of the first passes, with its initial weights
    loss_fn: Loss
    batch: Batches  # the first batch, as its micro-batches


@dataclass
class ExactValues:
    """Values of a problem, which all entrants of a race share. They are computed in a process in which no backend has
    been (``clean``), if there is one, else here. ``lent`` has the fingerprint of the network before any backend was
    made, or nothing."""

    problem: Problem
    shared: Shared
    clean: CleanProcess | None
    lent: Lent
    _is_made: bool = False

    def once(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``function(problem, *arguments)``, a value that ``shared.once`` can share, under a name."""
        if self.clean is not None:
            clean = self.clean

            def write(file: Path) -> None:
                self._make(clean)
                clean.save(file, function, arguments)

            try:
                return self.shared.once_written(name, write)
            except (CleanProcessError, OSError) as error:
                log.warning(f"{name} and the like are computed in the process of the backend ({error})")
                self.clean = None
        return self.shared.once(name, lambda: function(self.problem, *arguments))

    def _make(self, clean: CleanProcess) -> None:
        """Makes the problem in the clean process. Raises CleanProcessError where it is another problem there. Then
        nobody else may have our values."""
        if self._is_made:
            return
        network = clean.make([(x.detach().cpu().clone(), y.detach().cpu().clone()) for x, y in self.problem.batch])
        if self.lent.get("network", network) != network:
            self.shared = ALONE
            raise CleanProcessError("the network has other initial weights there")
        self._is_made = True


def of_network(model: nn.Module) -> Lent:
    """Returns the fingerprint of a network with its initial weights; to be taken before any backend is made."""
    return {"network": fingerprint({**params_of(model), **buffers_of(model)})}


def of_batch(batch: Batches) -> Lent:
    """Returns the fingerprint of the first batch, which every backend is given; to be taken before any step."""
    named = {f"{name}{number}": t for number, (x, y) in enumerate(batch) for name, t in (("x", x), ("y", y))}
    return {"batch": fingerprint(named)}


class Mapped(UserDict[str, Tensor]):
    """Large tensors that are mapped from a file. Only the tensor that was asked for last is in memory."""

    _last: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        self._forget()
        self._last = self.data[name]
        return self._last

    def __iter__(self) -> Iterator[str]:
        yield from self.data
        self._forget()

    def _forget(self) -> None:
        if self._last is not None:
            heap.forget(self._last)  # its pages are read again if somebody still looks at the tensor
            self._last = None
