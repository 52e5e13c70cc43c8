"""The formats in which a sum of gradients was computed: of its layers, of its network, and of all of it."""

from collections.abc import Iterable

import torch

from mpcompare.dtypes import HALF, dtype_name
from mpcompare.precision import PRECISIONS, Precision
from mpcompare.verdict.examine.forced.record import OUTPUT, is_real
from mpcompare.watching.events import Op, Root, needed
from mpcompare.watching.steps import Sum


def of_layers(seen: Sum) -> dict[str, str]:
    """Returns the dtypes of each layer's outputs, such as ``bf16+fp32``, by the name of the layer."""
    kinds = {
        name: sorted({dtype_name(v.dtype) for call in calls for v in call.outputs if is_real(v)})
        for name, calls in seen.record.calls.items()
    }
    return {name: "+".join(each) for name, each in kinds.items() if each and name != OUTPUT}


def precision_of(seen: Sum) -> Precision:
    """Returns the precision that has the roundings of a sum: the precision of its network, or of what the loop computes
    around its network, if this has fewer bits."""
    return _precision(_of_network(seen) | _of(seen.ops), seen)


def precision_of_network(seen: Sum) -> Precision:
    """Returns the precision of the network. A network may multiply in autocast's format between its layers, and a layer
    may add a bias in fp32, so that no layer returns this format. A loop may also compute what a part of the network is
    given next."""
    return _precision(_of_network(seen), seen)


def _of_network(seen: Sum) -> set[str]:
    passing = (call for calls in seen.record.calls.values() for call in calls if any(call.passes))
    products = {d for call in passing for kinds in call.products.values() for d in kinds}
    between = needed([event for event in seen.tape if not isinstance(event, Root)])
    layers = {kind for each in of_layers(seen).values() for kind in each.split("+")}
    return layers | {dtype_name(d) for d in products if dtype_name(d) == seen.autocast} | _of(between)


def _of(events: Iterable[object]) -> set[str]:
    """Returns the formats of 16 bits in which functions of a loop compute."""
    ops = [event for event in events if isinstance(event, Op)]
    return {dtype_name(d) for op in ops for d in (*op.dtypes, *op.within.values()) if d in HALF}


def _precision(kinds: set[str], seen: Sum) -> Precision:
    """Returns the precision of some formats. If both formats of 16 bits are among them, it is autocast's bf16, because
    autocast to bf16 gives fp16 to recurrent layers on a GPU."""
    wide = "tf32" if seen.tf32 else "fp32"
    outer = seen.first.autocast if seen.first is not None else None
    halves = ("bf16", "fp16") if outer is torch.bfloat16 else ("fp16", "bf16")
    return PRECISIONS[next((kind for kind in halves if kind in kinds), wide)]
