"""Defects of gradients, layer by layer, and of the formats in which a network is kept."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from mpcompare.dtypes import dtype_name, torch_dtype
from mpcompare.precision import FORMATS, PRECISIONS
from mpcompare.tasks.cast import STAY_IN_FP32
from mpcompare.verdict.examine.forced.kernels import has_output_of
from mpcompare.verdict.examine.forced.record import OUTPUT, is_real
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.examine.rounded_operands import MULTIPLY
from mpcompare.verdict.judge import layers as of_layers
from mpcompare.verdict.judge.check import listed
from mpcompare.verdict.judge.limits import COARSEST
from mpcompare.watching.examining import Replayed
from mpcompare.watching.handing_on import SHORT
from mpcompare.watching.judged import Defect, as_case, failed
from mpcompare.watching.looking import Look
from mpcompare.watching.network_then import as_it_was
from mpcompare.watching.steps import Sum, Taken
from mpcompare.watching.sums import hooks_after

LARGEST_SCALE = 2.0**24  # a gradient that needs a larger one is 0 but for roundings
BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def of_gradients(look: Look, sums: Mapping[Sum, Replayed]) -> Iterator[Defect]:
    """Yields sums that begin or end where they should not, and gradients beyond the roundings of their layer."""
    seen: list[Sum] = []
    for number, taken in enumerate(look.taken, start=1):
        if taken.sum is None or taken.sum in seen:
            continue
        seen.append(taken.sum)
        if taken.sum.stale:
            names = listed(taken.sum.stale)
            because = f"in update {number} the gradients of {names} still hold the gradients of the update before: "
            because += "nobody cleared them"
            yield Defect("accumulation", taken.sum.stale[0], because)
        # A loop may leave a batch out on purpose, such as one whose loss is too large, but not before each update.
        if taken.sum.dropped and all(each.dropped for each in look.used()) and look.attached.is_alone:
            because = f"the gradients of {taken.sum.dropped} backward passes were cleared before update {number} used "
            yield Defect("accumulation", "", because + "them")
        if taken.sum.clipped:
            because = f"gradients are clipped {taken.sum.clipped} between the backward passes of update {number}: "
            because += "the gradients of earlier micro-batches are clipped again, in sums with later ones"
            yield Defect("clip", "", because)
        yield from _without_gradient(look, taken.sum, number)
        yield from _recomputed(look, taken.sum, number)
        replay = sums.get(taken.sum)
        if replay is not None and replay.layers is not None:
            where = f"in update {number}"
            yield from _underflow(taken.sum, replay, where)
            case = as_case(look, taken.sum, replay)
            checks = of_layers.of_step(case, replay.layers, replay.reference, where, first_is_right=False)
            found = list(failed(checks))
            if (found or taken.sum.hooked) and PRECISIONS[replay.precision].is_16_bit:
                yield from _summed(look, taken, taken.sum, torch_dtype(PRECISIONS[replay.precision].storage), number)
            stale = [_of_stale_weights(look, taken.sum, defect.place, number) for defect in found]
            yield from [defect for defect in stale if defect is not None] or found


def _underflow(seen: Sum, replay: Replayed, where: str) -> Iterator[Defect]:
    """Yields gradients that fp16 loses without a loss scale, though each rounding is right: they are too small.

    A gap between two of the smallest numbers is ``s``. So n roundings have a norm of sqrt(n) s / 2 at most.
    """
    if replay.precision != "fp16" or seen.scaled or replay.layers is None:
        return
    lost = {}
    for layer, calls in seen.record.calls.items():
        place = replay.layers.places.get(f"gradient {layer}")
        elements = sum(g.numel() for call in calls for g in call.gradients if g is not None)
        most = math.sqrt(elements) * FORMATS["fp16"].smallest_subnormal / 2
        if place is not None and min(place.error, most) > COARSEST * place.norm > COARSEST * most / LARGEST_SCALE:
            lost[layer] = place.error / place.norm
    if lost:
        first, small = max(lost, key=lost.__getitem__), f"{FORMATS['fp16'].smallest_normal:.2g}"
        because = f"the gradient that arrives at {first or 'the network'} {where} is {100 * lost[first]:.2g} % off: "
        because += f"its numbers are below {small}, where fp16 has few digits. Scale the loss"
        yield Defect("underflow", first, because)


def _of_stale_weights(look: Look, seen: Sum, layer: str, number: int) -> Defect | None:
    """Returns a defect if a layer's outputs were made by the weights of an earlier update, which have moved since."""
    if layer not in seen.record.calls:  # it is a parameter
        return None
    used = look.used()
    own = [name for name in seen.weights if name.startswith(f"{layer}.")]
    for before in reversed(used[: used.index(seen)]):
        has_moved = not all(same_bits(before.weights[n], seen.weights[n]) for n in own)
        if has_moved and has_output_of(as_it_was(look.network, seen, before), seen.record, layer):
            earlier = next(n for n, taken in enumerate(look.taken, start=1) if taken.sum is before)
            because = f"{layer} computes in update {number} with the weights of update {earlier}"
            if seen.autocast:
                because += ". Autocast keeps its casts of weights until it is left: enter it once for each forward pass"
            return Defect("stale weights", layer, because)
    return None


def _summed(look: Look, taken: Taken, seen: Sum, dtype: torch.dtype, number: int) -> Iterator[Defect]:
    """Yields sums of micro-batches that have no more digits than ``dtype``, the format of the parts of each sum."""
    wide = [n for n in taken.raw if taken.dtypes[n] == "fp32" and n not in look.attached.masters]
    several = [n for n in wide if _micro_batches(look, seen, n) > 1]
    grads = {n: g[g != 0] for n in several if bool((g := taken.raw[n]).any())}
    short = [n for n, g in grads.items() if float((g.to(dtype) == g).float().mean()) > SHORT]
    if 2 * len(short) > len(grads):
        because = f"the gradients of {len(seen.roots)} micro-batches are summed in {dtype_name(dtype)} before "
        because += f"update {number}: the sums of {listed(short)} have no more digits"
        yield Defect("accumulation", short[0], because)


def _micro_batches(look: Look, seen: Sum, name: str) -> int:
    """Returns the number of backward passes that came to a layer with this parameter. Two networks may have a loss
    each, and a sum within one pass may be in 16 bits."""
    p = look.params.get(name)  # the network may have got others since
    layers = [n for n, module in look.network.named_modules() if any(own is p for own in module.parameters())]
    calls = [call for event in seen.calls for layer in layers for call in event.layers.get(layer, ())]
    passes = {each for call in calls for each in (call.first, *call.later)}
    return sum(not root.passes.isdisjoint(passes) for root in seen.roots)


def _without_gradient(look: Look, seen: Sum, number: int) -> Iterator[Defect]:
    """Yields layers at whose outputs gradients arrive, and whose trained parameters get none."""
    if any(root.of_some for root in seen.roots):
        return
    for layer, calls in seen.record.calls.items():
        module = look.network.get_submodule(layer) if layer != OUTPUT else None
        if not isinstance(module, (*MULTIPLY, *STAY_IN_FP32)):  # layers of these classes use all their parameters
            continue
        reached = [c for c in calls if c.without or any(g is not None and bool(g.any()) for g in c.gradients)]
        for own, p in module.named_parameters():
            name = look.sums.calls.names.get(id(p), "")
            given = [call for call in reached if own in call.trained]
            if given and name in seen.owned and name not in seen.grads and not hooks_after(p):
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
                kinds = [dtype_name(d[0]) for d in (first, call.again)]
                because = f"{layer} is computed in {kinds[0]}, and backward computes it once more in {kinds[1]}, in "
                yield Defect("precision", layer, because + f"update {number}")
            module = look.network.get_submodule(layer)
            trains = seen.first is not None and seen.first.attributes[layer]["training"]
            if isinstance(module, BATCH_NORMS) and module.track_running_stats and trains:
                because = f"backward computes {layer} once more in update {number}, and takes its batch into the "
                yield Defect("running statistics", layer, because + "running statistics twice")


def _in_training(look: Look) -> set[str]:
    """Returns the names of the modules that were in training mode in some call, or are so if no call was seen."""
    if first := [seen.first for seen in look.used() if seen.first is not None]:
        return {name for each in first for name, its in each.attributes.items() if its.get("training")}
    return {name for name, module in look.network.named_modules() if module.training}


def of_formats(look: Look) -> Iterator[Defect]:
    """Yields norms and other trained layers that are kept in 16 bits where other weights are fp32."""
    trained = {n: p for n, p in look.params.items() if p.requires_grad}
    wide = [n for n, p in trained.items() if p.dtype.itemsize > 2]
    if not wide:
        return
    trains = _in_training(look)
    for name, module in look.network.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        own = [(n, t) for n, t in tensors if f"{name}.{n}".lstrip(".") not in look.attached.masters]
        kept = [n for n, t in own if t.is_floating_point() and t.dtype.itemsize == 2]
        # A buffer may be a result of the network, which requires a gradient, too, and is not trained.
        short = [n for n, t in own if n in kept and t.requires_grad and t.is_leaf]
        short += [n for n in kept if n.startswith("running") and name in trains]
        if not short:
            continue
        kind = type(module).__name__
        dtype = dtype_name(dict(own)[short[0]].dtype)
        because = f"{name or 'the network'} ({kind}) keeps {listed(short)} in {dtype}, where other weights are fp32"
        is_norm = isinstance(module, STAY_IN_FP32) and not isinstance(module, nn.Embedding)
        yield Defect("normalization" if is_norm else "no master weights", name, because)
