"""Defects of updates, compared with the rule of their optimizer; of weights that a loop rounds between updates; and of
the loss scale, compared with its policy."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpcompare.dtypes import HALF, dtype_name
from mpcompare.verdict.examine.layers import owners
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.findings import Recipe
from mpcompare.verdict.judge import optimizer as of_optimizer
from mpcompare.verdict.judge.check import listed
from mpcompare.verdict.judge.drive import UpdateError
from mpcompare.watching.alone import left_out
from mpcompare.watching.examining import Updates
from mpcompare.watching.judged import Defect, as_examined, failed
from mpcompare.watching.looking import Look
from mpcompare.watching.rules import is_adamw
from mpcompare.watching.steps import Taken, in_turn, moved

MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
FEW = 7  # elements: if so many are expected, rounding at random leaves none of them in a share 1e-3 of all cases
MANY = 16  # numbers: a few may be clamped to what they are in 16 bits
LOST = 0.5  # a tensor does not train if a larger share of its updates is rounded away


def of_updates(look: Look, updates: Mapping[str, Updates]) -> Iterator[Defect]:
    """Yields updates that the optimizer's rule does not make, and moments that are wrong after right updates."""
    for name, update in updates.items():
        short = any(e.short > LOST for each in update.drive.updates for e in each.values())
        run, halves = as_examined(look, "bf16" if short else "fp32", Recipe(1)), in_16_bits(look)
        kept = [{n: e for n, e in each.items() if n not in halves} for each in update.drive.updates]
        where = name if len(updates) > 1 else "the loop"
        yield from failed(of_optimizer.of_passes(run, {where: replace(update.drive, updates=kept)}))
        yield from _moments(update)
        yield from _rule(look, name, update)
        yield from _lost(look, name, update)


def in_16_bits(look: Look) -> set[str]:
    """Returns the weights that are kept in 16 bits, without masters that the optimizer has in their place."""
    return {name for name, p in look.params.items() if p.dtype.itemsize <= 2} - look.attached.masters.keys()


def _moments(update: Updates) -> Iterator[Defect]:
    """Yields what an optimizer remembers wrongly after an update that is right by its rule."""
    for number, kept in update.moments.items():
        for kind in dict.fromkeys(kind for kind, _ in kept):
            wrong = {name: excess for (of, name), excess in kept.items() if of == kind and not excess <= 1}
            if wrong:
                because = f"{kind} of {listed(list(wrong))} after update {number} is up to {max(wrong.values()):.2g} "
                because += f"times as far as roundings make it from what {update.rules[next(iter(wrong))]} keeps"
                yield Defect("moments", next(iter(wrong)), because)


def _rule(look: Look, name: str, update: Updates) -> Iterator[Defect]:
    """Yields the decay of an AdamW that is added to the gradient, as Adam's decay is."""
    adam = [n for n, rule in update.rules.items() if rule == "Adam"]
    if adam and is_adamw(look.attached.optimizers[name]):
        because = f"{type(look.attached.optimizers[name]).__name__} is an AdamW, and adds the decay of {listed(adam)} "
        yield Defect("weight decay", adam[0], because + "to the gradient, as Adam does: both moments take it up")


def _lost(look: Look, optimizer: str, update: Updates) -> Iterator[Defect]:
    """Yields the roles of tensors that are kept in 16 bits and do not train: their updates are rounded away."""
    short = set() if left_out(look.attached.optimizers[optimizer]) else in_16_bits(look)  # it may have masters
    errors = [(n, e) for each in update.drive.updates for n, e in each.items() if n in short]
    if _at_random([e for _, e in errors], any(t.drew for t in look.taken if t.optimizer == optimizer)):
        return
    layers = owners(look.network, [], {})
    compensated = {name for step in look.taken for name, state in step.state_after.items() if _more(state)}
    by_role: dict[str, list[str]] = {}
    shares: dict[str, float] = {}
    for name, e in errors:
        if e.lost > LOST and name not in compensated:
            by_role.setdefault(layers[name].role or "weights", []).append(name)
            shares[name] = max(shares.get(name, 0.0), e.lost)
    for kind, names in by_role.items():
        names = list(dict.fromkeys(names))
        most = 100 * max(shares[n] for n in names)
        because = f"{listed(names)} ({kind}) are kept in 16 bits, and {most:.0f} % of their updates are rounded away"
        yield Defect("no master weights", names[0], because)


def _at_random(errors: Sequence[UpdateError], drew: bool) -> bool:
    """Returns whether an optimizer may round weights at random: it does so with all weights, or with none. If too few
    weights would tell, random numbers that it drew are enough."""
    far, should_far = sum(e.far for e in errors), sum(e.should_far for e in errors)
    return 2 * far > should_far or (drew and should_far < FEW)


def _more(state: Mapping[str, Any]) -> list[str]:
    """Returns what an optimizer remembers besides moments: it may be what roundings took from a weight (Kahan)."""
    return [kind for kind, value in state.items() if isinstance(value, Tensor) and value.dim() and kind not in MOMENTS]


def of_rounded_weights(taken: Sequence[Taken]) -> Iterator[Defect]:
    """Yields weights in fp32 that the loop rounds to 16 bits after an update."""
    for number, earlier, later in in_turn(taken):
        changed = moved(earlier.after, later.before)
        for half in HALF:
            wide = [n for n in changed if earlier.after[n].dtype is torch.float32]
            names = [n for n in wide if same_bits(earlier.after[n].to(half).float(), later.before[n])]
            numbers = sum(int((earlier.after[n] != later.before[n]).sum()) for n in names)
            if numbers >= MANY:
                because = f"the loop rounds {listed(names)}, which are fp32, to {dtype_name(half)} before step {number}"
                because += ": what an update adds below their last digit is lost"
                yield Defect("no master weights", names[0], because)
                return


def of_masters(look: Look) -> Iterator[Defect]:
    """Yields weights whose masters have moved, and which forward uses as they were before."""
    for number, earlier, later in in_turn(look.taken):
        both = [n for n in look.attached.masters if n in earlier.called and n in later.called]
        same = [n for n in both if same_bits(earlier.called[n], later.called[n])]
        stale = [n for n in same if not same_bits(later.called[n], later.before[n].to(later.called[n].dtype))]
        if stale:
            because = f"forward before step {number} has {listed(stale)} as before step {number - 1}: their masters "
            yield Defect("stale weights", stale[0], because + "have moved, and nobody has copied them to the weights")


def of_loss_scale(look: Look) -> Iterator[Defect]:
    """Yields the first loss scale that its policy does not make."""
    policy = copy.deepcopy(look.steps.policy)
    if policy is None:
        return
    said = "the loss scale is {:g} {} its update {}, where its policy says {:g}"
    for number, change in enumerate(look.steps.scales, start=1):
        if change.before != policy.scale:
            yield Defect("loss scale", "", said.format(change.before, "before", number, policy.scale))
            return
        policy.update(change.found_inf)
        if change.given:
            policy.scale = change.after
        elif change.after != policy.scale:
            yield Defect("loss scale", "", said.format(change.after, "after", number, policy.scale))
            return
