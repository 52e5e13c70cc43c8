"""Defects: what no intention makes right. Each has a cause, a place and a sentence."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from torch import Tensor, nn

from mpcompare.tasks.cast import STAY_IN_FP32
from mpcompare.verdict.examine.forced.record import OUTPUT, is_real
from mpcompare.verdict.examine.layers import owners
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.examine.oracle import MULTIPLY
from mpcompare.verdict.findings import Findings, Recipe
from mpcompare.verdict.judge import layers as of_layers
from mpcompare.verdict.judge import optimizer as of_optimizer
from mpcompare.verdict.judge.check import Case, Check, Examined, listed
from mpcompare.verdict.judge.drive import Drive, Gradients
from mpcompare.watching.examining import Replayed, Updates, longest_sum
from mpcompare.watching.handing_on import SAME, handed_on
from mpcompare.watching.looking import Look
from mpcompare.watching.steps import Sum, Taken

BATCH_NORMS = nn.modules.batchnorm._BatchNorm
LOST = 0.5  # the share of updates that are rounded away from which a tensor does not train


@dataclass(frozen=True)
class Defect:
    """Something that no intention makes right.

    Attributes:
        cause: a word or two, as those of docs/verdict.md.
        place: the layer, parameter or part of the loop; may be empty.
        sentence: the defect with its numbers.
    """

    cause: str
    place: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.sentence}"


def defects_of(look: Look, sums: Mapping[int, Replayed], updates: Mapping[str, Updates]) -> list[Defect]:
    """Returns all defects, each cause at each place once. The arguments are those of ``facts_of``."""
    found: dict[tuple[str, str], Defect] = {}
    for defect in _all(look, sums, updates):
        found.setdefault((defect.cause, defect.place), defect)
    return list(found.values())


def _all(look: Look, sums: Mapping[int, Replayed], updates: Mapping[str, Updates]) -> Iterator[Defect]:
    yield from _formats(look)
    yield from _policy(look)
    yield from _sums(look, sums)
    for number, taken in enumerate(look.taken, start=1):
        yield from _of_step(look, number, taken)
    yield from _repeated(look.taken)
    if look.sums.clipped_early:
        because = f"gradients are clipped ({look.sums.clipped_early}) before backward has made any, and not after"
        yield Defect("clip", "", because)
    yield from _updates(look, updates)


# Gradients, layer by layer


def _sums(look: Look, sums: Mapping[int, Replayed]) -> Iterator[Defect]:
    seen: list[Sum] = []
    for number, taken in enumerate(look.taken, start=1):
        if taken.sum is None or any(taken.sum is each for each in seen):
            continue
        seen.append(taken.sum)
        if taken.sum.stale:
            names = listed(taken.sum.stale)
            because = f"in update {number} the gradients of {names} still hold those of the update before: nobody "
            because += "cleared them"
            yield Defect("accumulation", taken.sum.stale[0], because)
        if taken.sum.dropped and len(look.attached.optimizers) == 1 and not look.attached.others:
            because = (
                f"the gradients of {taken.sum.dropped} backward passes were cleared before update {number} used them"
            )
            yield Defect("accumulation", "", because)
        if taken.sum.given_up:
            because = f"the gradients of {taken.sum.given_up} backward passes before update {number} held inf or NaN, "
            because += "and the loop left their update out, though nothing is scaled"
            if look.steps.scaler is None:
                yield Defect("skip", "", because)
        yield from _without_gradient(look, taken.sum, number)
        yield from _recomputed(look, taken.sum, number)
        replay = sums.get(id(taken.sum))
        if replay is not None and replay.layers is not None:
            where = f"in update {number}"
            case = _case(look, taken.sum, replay)
            checks = of_layers.of_step(case, replay.layers, replay.reference, where, first_is_right=False)
            yield from _failed(checks, _names(look))


def _without_gradient(look: Look, seen: Sum, number: int) -> Iterator[Defect]:
    """Yields layers at whose outputs gradients arrive, and whose trained parameters get none."""
    for layer, calls in seen.record.calls.items():
        module = look.network.get_submodule(layer) if layer != OUTPUT else None
        if not isinstance(module, (*MULTIPLY, *STAY_IN_FP32)):  # these use all that they have
            continue
        reached = [c for c in calls if c.without or any(g is not None and bool(g.any()) for g in c.gradients)]
        for own, p in module.named_parameters():
            name = look.sums.names.get(id(p), "")
            freed = getattr(p, "_post_accumulate_grad_hooks", None)
            given = [call for call in reached if own in call.trained]
            if given and name in seen.owned and name not in seen.grads and not freed:
                because = f"{name} has no gradient in update {number}, though gradients arrive at the output of {layer}"
                if given[0].without:
                    because = f"{name} has no gradient in update {number}: a reentrant checkpoint calls {layer}, and "
                    because += "nothing that the checkpoint is given requires one"
                yield Defect("gradient missing", name, because)


def _recomputed(look: Look, seen: Sum, number: int) -> Iterator[Defect]:
    """Yields layers that backward computes once more, in another format, or with running statistics."""
    for layer, calls in seen.record.calls.items():
        for call in calls:
            first = [v.dtype for v in call.outputs if is_real(v)]
            if not call.again or layer == OUTPUT:
                continue
            if call.again != first:
                kinds = [str(d[0]).removeprefix("torch.") for d in (first, call.again)]
                because = f"{layer} is computed in {kinds[0]}, and backward computes it once more in {kinds[1]}, in "
                yield Defect("precision", layer, because + f"update {number}")
            module = look.network.get_submodule(layer)
            if isinstance(module, BATCH_NORMS) and module.track_running_stats and seen.modes.get(layer):
                because = f"backward computes {layer} once more in update {number}, and takes its batch into the "
                yield Defect("running statistics", layer, because + "running statistics twice")


def _case(look: Look, seen: Sum, replay: Replayed) -> Case:
    order = [name for name in replay.dtypes for _ in seen.record.calls[name]]
    findings = Findings(
        precision=replay.precision,
        recipe=Recipe(batch_size=_rows(seen), accumulate=len(seen.roots)),
        longest_sum=longest_sum(look.network, seen),
        layers=owners(look.network, order, {}),
        first=Drive(),
        last=Gradients(math.nan, math.nan, math.nan),
    )
    run = Examined("the loop", replay.precision, {}, findings, pd.DataFrame())
    return Case(run, Examined("exact", replay.precision, {}, findings, pd.DataFrame()))


def _rows(seen: Sum) -> int:
    """Returns the number of rows that the network was given."""
    tensors = [[v for v in call.inputs if isinstance(v, Tensor) and v.dim()] for call in seen.record.calls[OUTPUT]]
    return sum(len(each[0]) for each in tensors if each) or 1


def _names(look: Look) -> list[str]:
    names = [n for n, _ in look.network.named_modules() if n] + list(look.params)
    names += [n for n, _ in look.network.named_buffers()]
    return sorted(set(names), key=len, reverse=True)


def _failed(checks: Iterator[Check], names: Sequence[str]) -> Iterator[Defect]:
    for check in checks:
        if not check.passed:
            place = next((n for n in names if _says(check.because, n)), "")
            place = place or check.tensor or next((n for n in names if _says(check.place, n)), "")
            yield Defect(check.cause or "gradients", place, check.because)


def _says(text: str, name: str) -> bool:
    return any(word.strip(",.:;()") == name for word in text.split())


# The step


def _of_step(look: Look, number: int, taken: Taken) -> Iterator[Defect]:
    where = f"in step {number}"
    bad = [n for n, t in taken.after.items() if not bool(t.isfinite().all())]
    if bad and not taken.skipped:
        yield Defect("inf or NaN", bad[0], f"{listed(bad)} hold inf or NaN after step {number}")
    if taken.sum is not None:
        buffers = taken.sum.buffers_after
        was = {n: b for n, b in taken.sum.buffers.items() if bool(b.isfinite().all())}
        bad = [n for n, b in buffers.items() if n in was and b.is_floating_point() and not bool(b.isfinite().all())]
        if bad:
            yield Defect("inf or NaN", bad[0], f"the buffers {listed(bad)} hold inf or NaN {where}")
    if taken.sum is not None and look.steps.scaler is not None:
        for factor, op in taken.sum.factors():
            if not math.isfinite(factor):
                because = f"the loss is multiplied by {factor:g} {where} ({op.line}), where the loss scale is "
                because += f"{taken.scale:g}: {str(op.dtypes[0]).removeprefix('torch.')} does not hold that"
                yield Defect("loss scale", "", because)
    moved = [n for n in taken.before if not same_bits(taken.before[n], taken.after[n])]
    if taken.skipped:
        if moved:
            yield Defect("skip", moved[0], f"the scaler skipped step {number}, and the weights changed")
        return
    idle = [n for n in moved if n not in taken.given]
    if idle:
        yield Defect("unused parameter", idle[0], f"{listed(idle)} moved {where}, and had no gradient")
    others = [n for n in taken.called if not same_bits(taken.called[n], taken.before[n])]
    if others:
        because = f"the gradients of step {number} were computed at other weights of {listed(others)} than it updates"
        yield Defect("weights", others[0], because)
    if taken.sum is None or not taken.finite:
        return
    yield from _handed_on(number, taken)


def _handed_on(number: int, taken: Taken) -> Iterator[Defect]:
    found = handed_on(taken)
    where = f"in step {number}"
    lost = [n for n in taken.raw if n not in taken.given]
    if lost:
        yield Defect("gradient missing", lost[0], f"{listed(lost)} got a gradient by backward, and have none {where}")
    if found.short:
        because = f"the gradients of {listed(found.short)} were rounded to 16 bits between backward and step {number}"
        yield Defect("gradient format", found.short[0], because)
    if math.isnan(found.factor):
        return
    tail_known = not any(root.hidden for root in taken.sum.roots) if taken.sum else False
    if taken.scaled and taken.scale != 1 and found.one and math.isclose(found.factor, taken.scale, rel_tol=SAME):
        because = (
            f"the optimizer gets gradients times the loss scale {taken.scale:g} {where}: nobody divided them by it"
        )
        yield Defect("gradient scaled", "", because)
    elif taken.scaled and taken.scale != 1 and not taken.unscaled and found.factor > 1 + SAME:
        because = f"the optimizer gets gradients times {found.factor:.4g} {where}: they are clipped, and still scaled"
        yield Defect("gradient scaled", "", because)
    elif taken.scaled and taken.scale != 1 and math.isclose(found.factor * taken.scale, 1, rel_tol=SAME):
        yield Defect(
            "gradient scaled", "", f"the gradients are divided by the loss scale {taken.scale:g} twice {where}"
        )
    if taken.unscaled and not taken.scaled and tail_known and taken.scale != 1:
        because = (
            f"the gradients are divided by the loss scale {taken.scale:g} {where}, and the loss was not multiplied "
        )
        because += "by it"
        yield Defect("gradient scaled", "", because)
    if taken.scaled and (names := found.still_scaled):
        because = (
            f"the gradients of {listed(names)} are still multiplied by the loss scale {taken.scale:g} {where}, and "
        )
        yield Defect("gradient scaled", names[0], because + "those of other parameters are not")
    if (usual := found.of_scaled) is not None:
        because = f"the gradients are clipped to a norm of {usual:g} before they are divided by the loss scale "
        because += (
            f"{found.scale:g} {where} ({found.before_unscale[0]}): what is left has a norm of {usual / found.scale:.3g}"
        )
        yield Defect("clip", "", because)


def _repeated(taken: Sequence[Taken]) -> Iterator[Defect]:
    last: dict[str, Taken] = {}
    trained: bool | None = None
    for number, step in enumerate(taken, start=1):
        before = last.get(step.optimizer)
        again = before is not None and not before.skipped and not step.skipped
        same = before is not None and not step.in_backward and (step.sum is None or step.sum is before.sum)
        if again and same and step.given:
            because = (
                f"step {number} updates with the gradients of step {number - 1} once more: no backward came between"
            )
            yield Defect("update again", "", because)
        last[step.optimizer] = step
        if step.sum is not None:
            if trained and not step.sum.training:
                because = f"the network is in evaluation mode from step {number} on, and was in training mode before"
                yield Defect("state", "", because)
            trained = step.sum.training


# Updates


def _updates(look: Look, updates: Mapping[str, Updates]) -> Iterator[Defect]:
    precision = "bf16"
    for name, update in updates.items():
        short = any(e.short > LOST for each in update.drive.updates for e in each.values())
        findings = Findings(
            precision if short else "fp32", Recipe(1), 1, owners(look.network, [], {}),
            Drive(), Gradients(math.nan, math.nan, math.nan),
        )  # fmt: skip
        run = Examined("the loop", findings.precision, {}, findings, pd.DataFrame())
        kept = [{n: e for n, e in each.items() if look.params[n].dtype.itemsize > 2} for each in update.drive.updates]
        drive = copy.copy(update.drive)
        object.__setattr__(drive, "updates", kept)
        where = name if len(updates) > 1 else "the loop"
        yield from _failed(of_optimizer.of_passes(run, {where: drive}), _names(look))
        yield from _lost(look, update)


def _lost(look: Look, update: Updates) -> Iterator[Defect]:
    """Yields the roles of tensors that are kept in 16 bits and do not train: their updates are rounded away."""
    layers = owners(look.network, [], {})
    by_role: dict[str, list[str]] = {}
    shares: dict[str, float] = {}
    for each in update.drive.updates:
        for name, e in each.items():
            if look.params[name].dtype.itemsize == 2 and e.lost > LOST:
                by_role.setdefault(layers[name].role or "weights", []).append(name)
                shares[name] = max(shares.get(name, 0.0), e.lost)
    for kind, names in by_role.items():
        names = list(dict.fromkeys(names))
        most = max(shares[n] for n in names)
        because = f"{listed(names)} ({kind}) are kept in 16 bits, and {most:.0%} of their updates are rounded away"
        yield Defect("no master weights", names[0], because)


def _formats(look: Look) -> Iterator[Defect]:
    """Yields norms, and others that are trained, in 16 bits where other weights are fp32."""
    trained = {n: p for n, p in look.params.items() if p.requires_grad}
    wide = [n for n, p in trained.items() if p.dtype.itemsize > 2]
    if not wide:
        return
    for name, module in look.network.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        short = [
            n
            for n, t in own
            if t.is_floating_point() and t.dtype.itemsize == 2 and (t.requires_grad or n.startswith("running"))
        ]
        if not short:
            continue
        kind = type(module).__name__
        dtype = str(dict(own)[short[0]].dtype).removeprefix("torch.")
        because = f"{name or 'the network'} ({kind}) keeps {listed(short)} in {dtype}, where other weights are fp32"
        cause = (
            "normalization"
            if isinstance(module, STAY_IN_FP32) and not isinstance(module, nn.Embedding)
            else "no master weights"
        )
        yield Defect(cause, name, because)


# The loss scale


def _policy(look: Look) -> Iterator[Defect]:
    policy = copy.deepcopy(look.steps.policy)
    if policy is None:
        return
    for number, change in enumerate(look.steps.scales, start=1):
        if change.before != policy.scale:
            yield _wrong_scale(f"before its update {number}", change.before, policy.scale)
            return
        policy.update(change.found_inf)
        if change.given:
            policy.scale = change.after
        elif change.after != policy.scale:
            because = (
                f"the loss scale is {change.after:g} after its update {number}, where its policy says {policy.scale:g}"
            )
            yield Defect("loss scale", "", because)
            return


def _wrong_scale(when: str, found: float, right: float) -> Defect:
    return Defect("loss scale", "", f"the loss scale is {found:g} {when}, where its policy says {right:g}")
