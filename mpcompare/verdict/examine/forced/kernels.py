"""Torch's own layers, computed again as torch computes them, from the operands that a step had.

On a CPU torch computes some norms in 16 bits, and sums gradients of norms and convolutions in 16 bits. And where the
gradient of a bias cancels, only the errors of its sum are left. That is no fault of a step that calls torch. So such a
step is compared with torch's own results.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpcompare.tasks.cast import stays_in_fp32
from mpcompare.tasks.task import put_buffers
from mpcompare.verdict.examine.forced.own_products import is_torchs
from mpcompare.verdict.examine.forced.random_numbers import Noted
from mpcompare.verdict.examine.forced.record import OUTPUT, Call, Record, is_real
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.examine.rounded_operands import MULTIPLY

NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")
# Other functions of torch that a norm may call: they turn its tensors, or are an activation.
CASTS = {"to", "float", "type_as", "half", "bfloat16"}
BESIDE = {
    "permute", "transpose", "movedim", "contiguous", "is_contiguous", "view", "reshape", "size", "dim", "__get__",
    "relu", "relu_", "silu", "gelu", "elu", "mish", "leaky_relu", "hardswish", "hardsigmoid", "sigmoid", "tanh",
}  # fmt: skip


@dataclass
class Kernels:
    """The results of torch's own layers."""

    layers: set[str] = field(default_factory=set)  # the names of the layers that could be computed again
    grads: dict[str, Tensor] = field(default_factory=dict)  # the gradients of their parameters, summed over all calls
    # the places at which the step had the same bits, as ``Layers.places`` names them
    alike: set[str] = field(default_factory=set)


def of_kernels(
    network: nn.Module,
    record: Record,
    after: Mapping[str, Tensor],
    products: tuple[type[nn.Module], ...] = MULTIPLY,
    of: Container[str] | None = None,
) -> Kernels:
    """Returns what torch's own norms, embeddings and layers of products make of the recorded operands.

    Args:
        network: in the state before the first call; it is in this state again in the end.
        after: the buffers after the last call.
        products: the kinds of layers of products.
        of: the names of parameters, of which a layer must have one; None: any layer.
    """
    names, made = {id(p): name for name, p in network.named_parameters()}, Kernels()
    for layer, calls in record.calls.items():
        module = network.get_submodule(layer) if layer != OUTPUT else None
        if not calls or module is None or not (isinstance(module, products) or stays_in_fp32(module)):
            continue
        if of is not None and not any(name in of for name, _ in module.named_parameters(prefix=layer)):
            continue
        before = {name: b.clone() for name, b in module.named_buffers()}
        is_measure = is_torchs(module) or _calls_torchs_norm(module, calls[0])
        put_buffers(module, before)  # the call above may have moved the buffers
        if not is_measure:
            continue
        grads, drawn = dict(made.grads), Noted({})
        with drawn:
            alike = [_again(module, call, grads, names) for call in calls]
        if not drawn.drawn:  # else the numbers are not the step's, such as the mask of an attention's dropout
            made.layers.add(layer)
            made.grads = grads
            if all(alike) and stays_in_fp32(module):
                made.alike.add(f"output {layer}")
            full = module.named_buffers(prefix=layer)
            made.alike |= {f"buffer {name}" for name, b in full if name in after and same_bits(b, after[name])}
        put_buffers(module, before)
    return made


def has_output_of(network: nn.Module, record: Record, layer: str) -> bool:
    """Returns whether a layer is torch's own, and makes the recorded outputs of the recorded operands, bit for bit."""
    module, calls = network.get_submodule(layer), record.calls[layer]
    if not is_torchs(module) or any(call.arguments is None for call in calls):
        return False
    return all(_has_bits(_results(module, call), call) for call in calls)


def _again(module: nn.Module, call: Call, grads: dict[str, Tensor], names: dict[int, str]) -> bool:
    """Computes a call again and adds its gradients; returns whether its outputs have the same bits."""
    if call.arguments is None:
        return False
    results = _results(module, call)
    params = [p for name, p in module.named_parameters() if p.requires_grad and name in call.trained]
    pairs = [(y, g) for y, g in zip(results, call.gradients, strict=False) if g is not None and y.requires_grad]
    if pairs and params:
        ends, arrived = [y for y, _ in pairs], [g.to(y.dtype) for y, g in pairs]
        for p, g in zip(params, torch.autograd.grad(ends, params, arrived, allow_unused=True), strict=True):
            if g is not None:
                name = names[id(p)]
                grads[name] = grads[name] + g if name in grads else g
    return _has_bits(results, call)


def _has_bits(results: list[Any], call: Call) -> bool:
    """Returns whether the outputs of a call have the bits of these results."""
    both = zip(results, call.outputs, strict=False)
    return all(same_bits(a, b) for a, b in both if is_real(a) and is_real(b))


def _results(module: nn.Module, call: Call, mode: AbstractContextManager[Any] | None = None) -> list[Any]:
    assert call.arguments is not None
    dtype, device = call.autocast, next((v.device.type for v in call.inputs if is_real(v)), "cpu")
    args, kwargs = tree_unflatten([v.detach() if is_real(v) else v for v in call.inputs], call.arguments)
    held = {name: p.to(call.held.get(name, p.dtype)) for name, p in module.named_parameters()}
    with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=dtype is not None), mode or nullcontext():
        return tree_flatten(functional_call(module, held, args, kwargs))[0]


def _calls_torchs_norm(module: nn.Module, call: Call) -> bool:
    """Returns whether the code of a norm, such as nanoGPT's, calls torch's norm, and nothing else that rounds or has a
    backward method of its own."""
    if call.arguments is None or not stays_in_fp32(module):
        return False
    results = _results(module, call, called := _Called())
    own = any(isinstance(node, BackwardCFunction) for node in functions_of(list(filter(is_real, results))))
    return not own and called.names - BESIDE in ({name} for name in NORMS)


def functions_of(ends: Sequence[Tensor], outputs: Container[int] = ()) -> Iterator[Any]:
    """Yields the functions of autograd's graph that made some tensors, down to those with the numbers ``outputs``."""
    left: list[Any] = [t.grad_fn for t in ends]
    seen: set[Any] = {None}
    while left:
        if (node := left.pop()) not in seen and node._sequence_nr() not in outputs:
            seen.add(node)
            left += [each for each, _ in node.next_functions]
            yield node


class _Called(TorchFunctionMode):
    """The names of the functions that are called while it is entered, without casts that keep all digits of the norm's
    operands. The result of the norm may be cast to any format."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func.__name__ in CASTS
        keeps_all = is_cast and torch.promote_types(args[0].dtype, result.dtype) is result.dtype
        if not (is_cast and (keeps_all or self.names & set(NORMS))):
            self.names.add(func.__name__)
        return result
