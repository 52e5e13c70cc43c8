"""A module cast to 16 bits by hand: all of it, or all but buffers and the layers that sum many numbers.

A norm sums the statistics of its inputs, and an embedding sums the gradients of each token. A weight that is computed
from others, as under weight norm and spectral norm, is computed in fp32 and then rounded. A buffer is no weight: it
may be a table of rotary frequencies, which 16 bits turn into other angles far from position 0, or a statistic to
which a step adds little.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves, tree_map

from mpcompare.tasks.batch import returns_trees
from mpcompare.tasks.frozen import widen
from mpcompare.tasks.functions import ProductsIn, in_dtype

# ``_NormBase`` is the base of batch norms and instance norms.
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
STAY_IN_FP32 = (*NORMS, nn.Embedding, nn.EmbeddingBag, ParametrizationList)
# Hooks of torch that compute a weight before each call: of two norms in their older form, and of pruned weights.
HOOKS_OF_WEIGHTS = (WeightNorm, SpectralNorm, BasePruningMethod)


def stays_in_fp32(module: nn.Module) -> bool:
    """Returns whether a layer sums many numbers: a layer of ``STAY_IN_FP32``, or a norm that a network brings itself,
    which is a layer with "norm" in its name whose parameters are vectors. With 16-bit weights torch's ``layer_norm`` on
    a CPU sums their gradients in 16 bits."""
    if isinstance(module, STAY_IN_FP32):
        return True
    own = list(module.parameters())
    is_layer = not any(True for _ in module.children())
    return bool(own) and is_layer and "norm" in type(module).__name__.lower() and all(p.dim() < 2 for p in own)


def computed_by_hooks(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns by name the weights that ``HOOKS_OF_WEIGHTS`` compute, and the parameters from which hooks do it."""
    computed: dict[str, tuple[str, ...]] = {}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            computed[hook.name] = f"{hook.name}_g", f"{hook.name}_v"
        elif isinstance(hook, SpectralNorm):
            computed[hook.name] = (f"{hook.name}_orig",)
        elif isinstance(hook, BasePruningMethod):
            computed[hook._tensor_name] = (f"{hook._tensor_name}_orig",)
    return computed


class InFp32:
    """An embedding whose weight stays in fp32. Other code of the network that reads the weight gets it in 16 bits, as
    its products need it."""

    in_16_bits: torch.dtype
    is_called = False

    @property
    def weight(self) -> Tensor:
        own: Tensor = self._parameters["weight"]  # type: ignore[attr-defined]
        return own if self.is_called else own.to(self.in_16_bits)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.is_called = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.is_called = False


def _give_in_16_bits(module: nn.Module, dtype: torch.dtype) -> None:
    """Lets other code read the weight of an embedding in ``dtype``."""
    own = type(module)
    if isinstance(module, nn.Embedding) and "weight" in module._parameters:
        module.__class__ = type(own.__name__, (InFp32, own), {"in_16_bits": dtype, "__module__": own.__module__})


def cast_module(model: nn.Module, dtype: torch.dtype) -> ProductsIn:
    """Casts parameters to ``dtype`` in place. Parameters of layers that stay in fp32 are left, and so are parameters
    from which hooks compute a weight.

    Hooks cast the inputs of these layers to fp32 and their outputs to ``dtype``. Tied parameters stay tied: a weight
    that an embedding shares with a product is cast, because the product needs it in ``dtype``. Buffers stay in fp32.

    Returns the mode in which the module is called. Each call needs it where another layer has a floating buffer, or
    where the module may return its loss.
    """

    def take_inputs_in(wanted: torch.dtype, module: nn.Module) -> None:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tuple(_cast(a, wanted) for a in args), {name: _cast(a, wanted) for name, a in kwargs.items()}

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def to_16_bits(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, dtype)

    def round_weights(module: nn.Module, args: tuple[Any, ...]) -> None:
        for name in computed_by_hooks(module):
            setattr(module, name, in_dtype(getattr(module, name), dtype))

    owners = [(id(p), stays_in_fp32(m)) for m in model.modules() for p in m.parameters(recurse=False)]
    kept = {p for p, stays in owners if stays} - {p for p, stays in owners if not stays}
    has_buffers = False
    for module in model.modules():
        if stays_in_fp32(module):
            take_inputs_in(torch.float32, module)
            widen(module)  # frozen parameters may have 16 bits
            module.register_forward_hook(to_16_bits)
            _give_in_16_bits(module, dtype)
            continue
        operands = {part for parts in computed_by_hooks(module).values() for part in parts}
        if operands:
            module.register_forward_pre_hook(round_weights)
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in kept and name not in operands:
                p.data = p.data.to(dtype)
        has_buffers |= any(b.is_floating_point() or b.is_complex() for b in module.buffers(recurse=False))
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):  # they look at the dtype of their input themselves
            take_inputs_in(dtype, module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one piece
    mode = ProductsIn(dtype, has_buffers or returns_trees(model))
    mode.put_on(model)
    return mode


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts a tensor, or the tensors of a nest, which takes ten times as long to go over. A nest without others is
    handed on itself: a layer may write into a list or a dict."""
    if isinstance(value, Tensor):
        return in_dtype(value, dtype)
    others = (isinstance(leaf, Tensor) and in_dtype(leaf, dtype) is not leaf for leaf in tree_leaves(value))
    return tree_map(lambda leaf: in_dtype(leaf, dtype), value) if any(others) else value


def cast_wholly(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts all parameters and floating buffers to ``dtype`` in place: ``model.to(dtype)``, tensor by tensor, as
    torch's tensors without data allow."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
