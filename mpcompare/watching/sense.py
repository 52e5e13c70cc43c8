"""The duties of every optimizer, whatever its rule is: to go downhill, and to move what has a gradient.

Each is said only where no right optimizer is known to do so. An optimizer that has more than its groups, its state and
plain values, such as masters of its own or another optimizer, is not accused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpcompare.dtypes import HALF
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.judge.check import listed
from mpcompare.watching.alone import left_out
from mpcompare.watching.defects_of_updates import MOMENTS, in_16_bits
from mpcompare.watching.examining import Updates
from mpcompare.watching.handing_on import decay_of
from mpcompare.watching.judged import Defect
from mpcompare.watching.looking import Look
from mpcompare.watching.rules import is_torchs
from mpcompare.watching.steps import Taken

# Words in the names of optimizers and of their settings that may mean uphill, and those that may leave weights at 0.
UPWARDS = re.compile(
    "maxim|ascen|negat|advers|flip|revers|pgd|fgsm|attack|perturb|dual|lagrang|multipl|climb|reward", re.IGNORECASE
)
AT_ZERO = re.compile("l1|lambda|lasso|prox|ftrl|spars|mask|soft|bias|free|skip|only|exp|multipl|mirror", re.IGNORECASE)
MANY = 32  # elements: so few may agree by chance
MOST = 0.99  # a share of elements
FEWEST = 3  # updates in which nothing moved


def of_sense(look: Look, name: str, update: Updates) -> Iterator[Defect]:
    """Yields what makes no sense in the updates of one optimizer."""
    optimizer = look.attached.optimizers[name]
    taken = [t for t in look.taken if t.optimizer == name and t.given and t.finite and not t.skipped]
    if not taken or left_out(optimizer) or any(t.closures or t.in_backward for t in taken):
        return
    settings = {**vars(optimizer), **taken[0].settings[next(iter(taken[0].settings))]}
    words = [name, type(optimizer).__name__, *settings]
    if not is_torchs(optimizer):
        is_on = [word for word in words if settings.get(word, True) not in (None, False)]
        if not any(map(UPWARDS.search, is_on)):
            yield from _uphill(taken)
        if not any(map(AT_ZERO.search, words)):
            yield from _left_at_zero(taken)
    yield from _rounded_away(look, update, taken)
    yield from _grown(optimizer, taken)


def _grown(optimizer: torch.optim.Optimizer, taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields a decay that the loop subtracts from the gradients of one of torch's optimizers, which go downhill."""
    decays = [decay_of(step) for step in taken]
    settings = [shared for step in taken for shared in step.settings.values()]
    if any(s.get("maximize") or (s.get("lr") or 0) < 0 for s in settings) or not is_torchs(optimizer):
        return
    if all(c is not None and c < 0 for c in decays):
        because = f"the loop adds {decays[0]:.4g} times the weights to the gradients: such a decay lets weights grow"
        yield Defect("weight decay", "", because)


def _rate(step: Taken, name: str) -> float:
    """Returns the rate of a parameter; 0 where its optimizer finds one itself."""
    return float(step.settings[name].get("lr") or 0.0)


def _uphill(taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields updates along the gradient. Elements that move to 0, as decay moves them, are left out."""
    up, total, worst, names = 0, 0, 1.0, []
    for step in taken:
        for name, grad in step.given.items():
            remembered = [v for v in step.state[name].values() if isinstance(v, Tensor) and v.dim()]
            if any(bool(v.any()) for v in remembered) or not _rate(step, name) > 0 or name in step.row_by_row:
                continue
            w, change = step.before[name].double(), step.after[name].double() - step.before[name].double()
            along = (change * grad)[(w * change >= 0) & (change != 0) & (grad != 0)]
            if len(along):
                share = float((along > 0).double().mean())
                up, total, worst = up + int((along > 0).sum()), total + len(along), min(worst, share)
                names.append(name)
    if total >= MANY and up >= MOST * total and worst > MOST / 2:
        because = f"the first updates of {listed(list(dict.fromkeys(names)))} go along the gradients, and not against "
        yield Defect("optimizer", names[0], because + f"them, in {100 * up / total:.3g} % of the elements: uphill")


def _left_at_zero(taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields tensors that begin at 0 and stay there, though all others of their group move: what multiplies their
    updates is 0. Their gradients have both signs, so that no bound of the weights keeps them."""
    for seen, still in _unmoved(taken):
        both = [n for n in still if all(bool((t.given[n] > 0).any() and (t.given[n] < 0).any()) for t in taken)]
        at_zero = [n for n in both if not taken[0].before[n].any()]
        if at_zero and len(seen) > len(still) == len(at_zero):
            because = f"{listed(at_zero)} are 0 and no update moves them, though their gradients are not 0"
            yield Defect("update left out", at_zero[0], because)


def _unmoved(taken: Sequence[Taken]) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the parameters of each group that get a gradient and a rate in all updates, and those of them that never
    move. Fewer than ``FEWEST`` updates say nothing."""
    groups: dict[int, list[str]] = {}
    for name, shared in taken[0].settings.items():
        groups.setdefault(id(shared), []).append(name)
    for names in groups.values() if len(taken) >= FEWEST else ():
        seen = [n for n in names if all(n in t.given and _rate(t, n) > 0 for t in taken)]
        yield seen, [n for n in seen if all(same_bits(t.before[n], t.after[n]) for t in taken)]


def _rounded_away(look: Look, update: Updates, taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields weights in 16 bits that never move, though others of their group move so far that these should, too, if
    they were rounded by chance. A wider or signed tensor of their size may keep what is lost."""
    short = in_16_bits(look)
    for seen, still in _unmoved(taken) if short else ():
        steps = [(t.after[n] - t.before[n]).double().abs().mean() for t in taken for n in seen if n not in still]
        far = float(torch.stack(steps).median()) if steps else 0.0
        lost = [
            n
            for n in still
            if n in short
            and taken[0].before[n].dtype in HALF
            and n in update.unknown
            and not any(_may_keep(t.state_after[n], t.before[n]) for t in taken)
            and sum(float((t.given[n] != 0).double().mul(far / _gap(t.before[n])).sum()) for t in taken) > MANY / 2
        ]
        if lost:
            because = f"{listed(lost)} are kept in 16 bits, and all of their updates are rounded away: others of the "
            yield Defect("no master weights", lost[0], because + f"same group move by {far:.2g} on average")


def _may_keep(state: Mapping[str, Any], w: Tensor) -> bool:
    others = [v for k, v in state.items() if k not in MOMENTS and isinstance(v, Tensor) and v.shape == w.shape]
    return any(bool((v < 0).any()) or same_bits(v.to(w.dtype), w) for v in others)


def _gap(w: Tensor) -> Tensor:
    """Returns the distance of each number to the next larger one of its format."""
    return (torch.nextafter(w.abs(), torch.full_like(w, torch.inf)) - w.abs()).double()
