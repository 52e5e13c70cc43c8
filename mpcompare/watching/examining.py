"""Comparisons of a loop that was seen: gradients with a forced replay, updates with the optimizer's rule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mpcompare.dtypes import HALF, dtype_name, torch_dtype
from mpcompare.errors import first_line
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine.adam_mistakes import EPS_BEFORE
from mpcompare.verdict.examine.errors import UNIT_ROUNDOFF, largest, update_errors
from mpcompare.verdict.examine.forced.kernels import of_kernels
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError
from mpcompare.verdict.examine.forced.samples import EarlierSteps
from mpcompare.verdict.examine.forced.step import compared_with_the_replay
from mpcompare.verdict.examine.known_mistakes import known_mistakes, of_all
from mpcompare.verdict.examine.seen import Seen
from mpcompare.verdict.examine.update_rule import digits
from mpcompare.verdict.judge.drive import Drive, KnownMistake, Step, UpdateError
from mpcompare.verdict.judge.replayed import Layers
from mpcompare.watching.events import Op, Root
from mpcompare.watching.formats import of_layers, precision_of
from mpcompare.watching.looking import Look
from mpcompare.watching.network_then import as_it_was, without_autocast
from mpcompare.watching.playing import NotInFloat64Error
from mpcompare.watching.replaying import recorded_sum
from mpcompare.watching.rules import COARSE, Rule, is_by_name, is_torchs, rules_of, update_of
from mpcompare.watching.steps import Sum, Taken


@dataclass
class Replayed:
    """A sum of gradients, replayed."""

    precision: str  # the precision that has its roundings
    layers: Layers | None  # None where it could not be replayed
    why: str  # the reason why the sum or its loss could not be replayed; else empty
    # for each loss that the roots are made of, the derivative of the root by this loss
    shares: list[tuple[Op | None, float]] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)  # the dtype of each layer's output
    reference: Layers | None = None  # the errors of torch's own norms; None where nothing was replayed


def replayed(look: Look, seen: Sum, earlier: EarlierSteps) -> Replayed:
    """Returns a sum of gradients, layer by layer, from the root of each backward on.

    Args:
        earlier: earlier sums. If one of them is like this sum, its roundings are taken; else this sum is added.
    """
    precision, dtypes = precision_of(seen), of_layers(seen)
    if seen.hidden:
        return Replayed(precision.name, None, seen.hidden, dtypes=dtypes)
    if not all(math.isfinite(g.norm) for g in seen.grads.values()):
        return Replayed(precision.name, None, "its gradients hold inf or NaN", dtypes=dtypes)
    seen = look.sums.spool.back(seen)
    hidden = next((root.hidden for root in seen.roots if root.hidden), "")
    apart = {name for root in seen.roots if root.hidden for name in root.uses} | seen.hooked
    try:
        network = as_it_was(look.network, seen)
        with torch.no_grad():
            kernels = of_kernels(network, seen.record_of_still(), seen.buffers_after)
        step = recorded_sum(seen, network, look.derivatives, kernels)
        with torch.enable_grad(), without_autocast():
            layers = compared_with_the_replay(step, precision, earlier)
    except NotReplayedError as error:
        return Replayed(precision.name, None, str(error), dtypes=dtypes)
    except NotInFloat64Error as error:
        if any(root.on_inner for root in seen.roots):  # gradients come down through more than the outputs
            why = f"a loss depends on {error}, and on values within the network"
            return Replayed(precision.name, None, why, dtypes=dtypes)
        tape = [replace(event, hidden=str(error)) if isinstance(event, Root) else event for event in seen.tape]
        return replayed(look, replace(seen, tape=tape), earlier)
    except Exception as error:  # whatever somebody's own network does in float64
        return Replayed(precision.name, None, f"its replay stopped with {first_line(error)}", dtypes=dtypes)
    if apart:
        known = {name: e for name, e in layers.gradients.items() if name not in apart}
        layers = replace(layers, gradients=known, rounding={name: layers.rounding[name] for name in known})
    alike = {at: place for at, place in layers.places.items() if at in kernels.alike}
    reference = replace(layers, places=alike, gradients=step.own)
    unseen = f"it depends on {hidden}, of which no function of torch was seen" if hidden else ""
    return Replayed(precision.name, layers, unseen, step.shares, dtypes, reference)


Moments = dict[tuple[str, str], float]  # by kind and parameter
Wrong = tuple[Taken, int, Rule, list[str]]  # a step, its number, the rule, and the parameters that have it


@dataclass
class Updates:
    """The updates of one optimizer, compared with its rule."""

    drive: Drive  # the optimizer's steps, as the examination of a backend has them
    rules: dict[str, str]  # by parameter the name of the rule that makes its updates; empty where none does
    unknown: dict[str, str]  # why a parameter's updates are not compared, by the reason
    # by the number of each step that is an update, the largest errors over their bounds of a known rule's moments
    moments: dict[int, Moments]


def compared(look: Look, name: str, precision: str) -> Updates:
    """Returns all updates of an optimizer, compared with its rule."""
    optimizer, compute = look.attached.optimizers[name], torch_dtype(PRECISIONS[precision].storage)
    short = compute if compute in HALF else torch.bfloat16  # weights of fp32 have more digits than this format
    taken = [step for step in look.taken if step.optimizer == name]
    steps: list[Step] = []
    errors: list[dict[str, UpdateError]] = []
    chosen: dict[str, Rule] = {}
    unknown: dict[str, str] = {}
    wrong: list[Wrong] = []
    odd: list[Wrong] = []  # right by their own code, and by no rule that we know
    by_known: dict[int, dict[str, UpdateError]] = {}
    moments: dict[int, Moments] = {}
    for number, step in enumerate(taken):
        seen = Seen(step.before, step.after, step.given, 0.0, grads=step.raw, scale=step.scale, skipped=step.skipped)
        finite = step.finite if step.skipped else all(map(math.isfinite, step.norms.values()))
        said = seen.step(finite, step.by_scaler, step.scale)
        if step.skipped or not step.finite or not step.given:
            if step.skipped or step.by_scaler:
                steps.append(said)
            continue
        found: dict[str, UpdateError] = {}
        kept: Moments = {}
        unknown |= {n: f"the rows of the sparse gradient of {n} are added one by one" for n in step.row_by_row}
        for names in _groups(step):
            try:
                state = step.state[names[0]] or step.state_after[names[0]]
                rules = rules_of(optimizer, step.settings[names[0]], state, look.steps.own[name])
                tried = [(rule, *_errors(rule, step, names, short)) for rule in rules]
            except Exception as error:  # whatever somebody's own optimizer does with one tensor
                unknown.update(dict.fromkeys(names, f"their replay stopped with {first_line(error)}"))
                continue
            right = [each for each in tried if all(x.excess <= 1 for x in each[1].values())]
            if not tried or (not right and _is_another(optimizer, (step, number, tried[0][0], names), compute)):
                unknown.update(dict.fromkeys(names, f"no update of {type(optimizer).__name__} can be replayed"))
                continue
            rule, best, of_moments = (right or tried)[0]
            chosen.update(dict.fromkeys(names, rule))
            found |= best
            if right and rule.known is not None:
                kept |= of_moments
            if not right:
                wrong.append((step, number, rule, names))
            elif rule.known is None and tried[0][0].known is not None:
                odd.append((step, number, tried[0][0], names))
                by_known.setdefault(len(errors), {}).update(tried[0][1])
        errors.append(found)
        moments[number + 1] = kept
        # Weights may stay as they are where roundings take all of an update away, or at random.
        nothing = step.drew or not any(e.lost > e.lost_in_fp32 for e in found.values())
        steps.append(said if seen.moved or not nothing else replace(said, moved=True))
    if odd and not _is_another(optimizer, odd[0], compute) and _made_by(odd, compute) - {EPS_BEFORE}:
        wrong += odd
        for number, found in by_known.items():
            errors[number] |= found
    last = {k: {n: s[k] for n, s in taken[-1].state_after.items() if k in s} for k in ("exp_avg", "exp_avg_sq")}
    shares = digits(last) if wrong else {}
    drive = Drive(steps, errors, known_mistakes=_mistakes(wrong, compute), digits=shares)
    return Updates(drive, {n: rule.name for n, rule in chosen.items()}, unknown, moments)


def _made_by(wrong: Sequence[Wrong], compute: torch.dtype) -> set[str]:
    """Returns the known mistakes that make all these updates."""
    return {mistake for mistake, each in _mistakes(wrong, compute).items() if each.excess <= 1}


def _is_another(optimizer: torch.optim.Optimizer, wrong: Wrong, compute: torch.dtype) -> bool:
    """Returns whether an unknown rule made updates: the name of the optimizer's class does not say that it has a known
    rule. Somebody's own optimizer may also add eps before the bias correction, as the last form in Adam's paper
    does."""
    step, _, _, names = wrong
    if not is_by_name(optimizer, step.settings[names[0]]):
        return True
    return not is_torchs(optimizer) and _made_by([wrong], compute) == {EPS_BEFORE}


def _groups(step: Taken) -> list[list[str]]:
    """Returns the parameters that have a gradient, group by group."""
    groups: dict[int, list[str]] = {}
    for name in step.given:
        if name not in step.row_by_row:
            groups.setdefault(id(step.settings[name]), []).append(name)
    return list(groups.values())


def _errors(
    rule: Rule, step: Taken, names: Sequence[str], short: torch.dtype
) -> tuple[dict[str, UpdateError], Moments]:
    """Returns how far the updates of some parameters are from a rule, and so are the moments after these updates."""
    found: dict[str, UpdateError] = {}
    moments: Moments = {}
    for name in names:
        dtype = step.dtypes[name]
        after = {kind: v for kind, v in step.state_after[name].items() if isinstance(v, Tensor) and v.dim()}
        replay = rule.replay(dtype, {dtype_name(v.dtype) for v in after.values()})
        found |= update_errors(replay, update_of(step, [name]), short, COARSE.get(dtype, 1.0))
        for kind, (value, magnitude) in replay.kept(name).items():
            if kind in after and step.state[name]:  # without a state before, the first update says nothing of the rule
                error = (after[kind].double() - value).abs_()
                moments[kind, name] = largest(error.div_(magnitude.mul(UNIT_ROUNDOFF)))
    return found, moments


def _mistakes(wrong: Sequence[Wrong], compute: torch.dtype) -> dict[str, KnownMistake]:
    """Returns the known mistakes that make all updates that are wrong, and how far they are from each."""
    found: list[dict[str, KnownMistake]] = []
    for step, number, rule, names in wrong:
        names = [n for n in names if step.dtypes[n] == "fp32"]
        if rule.known is None or not names:
            continue
        task = Task(nn.Identity, "mse", rule.known, batch_size=1)
        found.append(known_mistakes(task, [update_of(step, names, number).in_part()], compute))
    return of_all(found) or ({"": KnownMistake("", math.inf)} if wrong else {})
