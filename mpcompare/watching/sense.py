"""What every optimizer must do, whatever its rule is: go downhill, move what has a gradient, decay what it says that it
decays, and use the rate of each group.

Each is said only where no right optimizer is known to do so. An optimizer that has more than its groups, its state and
plain values, such as masters of its own or another optimizer, is not accused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpcompare.dtypes import HALF
from mpcompare.tasks.any_optimizer import trained
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.judge.check import listed
from mpcompare.watching.defects_of_updates import MOMENTS, in_16_bits
from mpcompare.watching.examining import Updates, errors_of
from mpcompare.watching.handing_on import decay_of
from mpcompare.watching.judged import Defect
from mpcompare.watching.looking import Look
from mpcompare.watching.rules import rules_of
from mpcompare.watching.steps import Taken, in_turn, moved

UPWARDS = re.compile("maxim|ascen|negat|advers|flip|revers", re.IGNORECASE)  # names of settings that mean uphill
SPARSE = re.compile("l1|lambda|lasso|prox|ftrl|spars|mask|soft", re.IGNORECASE)  # and of those that leave weights at 0
MANY = 32  # elements: so few may agree by chance
MOST = 0.99  # a share of elements
FEWEST = 3  # updates in which nothing moved


def of_sense(look: Look, name: str, update: Updates) -> Iterator[Defect]:
    """Yields what makes no sense in the updates of one optimizer."""
    optimizer, own = look.attached.optimizers[name], look.steps.own[name]
    taken = [t for t in look.taken if t.optimizer == name and t.given and t.finite and not t.skipped]
    if not taken or own.left_out or any(t.closures or t.in_backward for t in taken):
        return
    settings = {**own.attributes, **taken[0].settings[next(iter(taken[0].settings))]}
    words = [type(optimizer).__name__, *(key for key, v in settings.items() if v is not None and v is not False)]
    if not _is_torchs(optimizer):
        if not any(map(UPWARDS.search, words)):
            yield from _uphill(taken)
        if not any(map(SPARSE.search, words)):
            yield from _left_at_zero(taken)
        with suppress(Exception):  # whatever somebody's own optimizer does with one tensor
            yield from _undecayed(look, name, update, taken)
    with suppress(Exception):
        yield from _rates(look, name, update, taken)
    yield from _rounded_away(look, update, taken)
    yield from _grown(optimizer, taken)


def _grown(optimizer: torch.optim.Optimizer, taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields a decay that the loop subtracts from the gradients of one of torch's optimizers, which go downhill."""
    decays = [decay_of(step) for step in taken]
    settings = [shared for step in taken for shared in step.settings.values()]
    if any(s.get("maximize") or (s.get("lr") or 0) < 0 for s in settings) or not _is_torchs(optimizer):
        return
    if all(c is not None and c < 0 for c in decays):
        because = f"the loop adds {decays[0]:.4g} times the weights to the gradients: such a decay lets weights grow"
        yield Defect("weight decay", "", because)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


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


def _undecayed(look: Look, name: str, update: Updates, taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields a decay in the settings that no update makes: the optimizer's own code, which makes all updates, does the
    same from any other weights. The loop may also decay them by hand."""
    step, kind = taken[0], type(look.attached.optimizers[name]).__name__
    by_hand = {n for _, a, b in in_turn(taken) for n in moved(a.after, b.before)}
    by_hand |= {n for t in taken for n in moved(t.raw, t.given)}
    decayed = [n for n in step.given if step.settings[n].get("weight_decay") and look.params[n].dim() > 1]
    if not decayed or update.unknown or by_hand or set(update.rules.values()) != {kind}:
        return
    for n in decayed:
        rules = rules_of(look.attached.optimizers[name], step.settings[n], step.state_after[n], look.steps.own[name])
        w = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).view(3, 4, *[1] * (look.params[n].dim() - 2))
        grads = [w.flip(0), w.flip(1), w.sin()]
        ways = [trained(rules[-1].make, start, grads, 1e-3) - start for start in (w, 3 - 100 * w)] if rules else []
        if not ways or float((ways[0] - ways[1]).abs().max()) > 1e-9:
            return
    decay = float(step.settings[decayed[0]]["weight_decay"])
    because = f"{kind} has a weight_decay of {decay:g} for {listed(decayed)}, and its updates do not depend on the "
    yield Defect("weight decay", decayed[0], because + "weights")


def _rates(look: Look, name: str, update: Updates, taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields updates that the optimizer's own code makes of a parameter alone with the rate of another group."""
    unknown = [n for n in update.unknown if n in taken[0].given]
    rates = {_rate(taken[0], n) for n in taken[0].settings}
    for rate in rates if unknown and len(rates) > 1 else ():
        names = [n for n in unknown if _rate(taken[0], n) != rate]
        wrong = [n for n in names if all(_is_with(look, name, step, n, rate) for step in taken[:FEWEST])]
        if wrong:
            because = f"the updates of {listed(wrong)} are made with {rate:g}, the learning rate of another group, and "
            yield Defect("parameter groups", wrong[0], because + f"not with {_rate(taken[0], wrong[0]):g}")
            return


def _is_with(look: Look, optimizer: str, step: Taken, name: str, rate: float) -> bool:
    """Returns whether an optimizer's own code makes an update with a rate."""
    rules = rules_of(
        look.attached.optimizers[optimizer],
        step.settings[name],
        step.state[name] or step.state_after[name],
        look.steps.own[optimizer],
    )
    other = replace(step, settings={name: {**step.settings[name], "lr": rate}})
    known = [rule for rule in rules if rule.known is None]
    errors = [errors_of(rule, other, [name], torch.bfloat16)[0] for rule in known]
    return any(e[name].excess <= 1 for e in errors)
