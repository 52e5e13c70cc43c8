"""The weights between the steps of an optimizer: what the loop itself does with them."""

from collections.abc import Iterator, Sequence

import torch

from mpcompare.dtypes import HALF, dtype_name
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.judge.check import listed
from mpcompare.watching.defect import Defect
from mpcompare.watching.steps import Taken

MANY = 16  # numbers: a few may be clamped to what they are in 16 bits


def moved_between(taken: Sequence[Taken]) -> list[str]:
    """Returns the weights that the loop moves between two updates: it clamps them, or sets them to an average."""
    return sorted({name for _, earlier, later in _in_turn(taken) for name in _moved(earlier.after, later.before)})


def moved_before(taken: Sequence[Taken]) -> list[str]:
    """Returns the weights that move between a call of the network and the step. The loop adds noise to them for
    backward alone, or decays them by hand, or forward writes them."""
    return sorted({name for step in taken for name in _moved(step.called, step.before)})


def of_rounded_weights(taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields weights in fp32 that the loop rounds to 16 bits after an update."""
    for number, earlier, later in _in_turn(taken):
        moved = _moved(earlier.after, later.before)
        for half in HALF:
            wide = [n for n in moved if earlier.after[n].dtype is torch.float32]
            names = [n for n in wide if same_bits(earlier.after[n].to(half).float(), later.before[n])]
            numbers = sum(int((earlier.after[n] != later.before[n]).sum()) for n in names)
            if numbers >= MANY:
                because = f"the loop rounds {listed(names)}, which are fp32, to {dtype_name(half)} before step {number}"
                because += ": what an update adds below their last digit is lost"
                yield Defect("no master weights", names[0], because)
                return


def _in_turn(taken: Sequence[Taken]) -> Iterator[tuple[int, Taken, Taken]]:
    """Yields the number of each step, the step before it of the same optimizer, and the step itself."""
    last: dict[str, Taken] = {}
    for number, step in enumerate(taken, start=1):
        if step.optimizer in last:
            yield number, last[step.optimizer], step
        last[step.optimizer] = step


def _moved(earlier: Params, later: Params) -> list[str]:
    return [name for name, w in later.items() if name in earlier and not same_bits(earlier[name], w)]
