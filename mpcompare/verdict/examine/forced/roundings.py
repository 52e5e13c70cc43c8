"""One rounding of each result: the least error that an implementation of a precision may have.

While the mode is entered, the result of every operator is rounded, forward and backward, to the digits of the precision
on a grid that is stretched at random, so that several samples have several errors (in the spirit of Parker, "Monte
Carlo Arithmetic", UCLA CSD-970002, 1997). Where terms cancel, these errors are all that is left of a result.
"""

import math
import random
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from mpcompare.dtypes import HALF, dtype_name, torch_dtype
from mpcompare.precision import FP16, FP32, Precision
from mpcompare.verdict.examine.numerics import chunks
from mpcompare.verdict.examine.unseen import Unseen
from mpcompare.verdict.examine.widened import values_of

SEEDS = 32  # the number of elements of a tensor on which its random factor depends
ADDMM, CONVOLUTION = torch.ops.aten.addmm.default, torch.ops.aten.convolution.default
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
CONVOLUTIONS = (CONVOLUTION, CONVOLUTION_BACKWARD)
DETACH = torch.ops.aten.detach.default
# Operators that pass down a small rest of larger terms, as where two numbers are normed. No rounding of an operand or
# of the result is as large as the roundings within such an operator.
CANCELLING = {
    "aten::native_layer_norm_backward", "aten::native_group_norm_backward", "aten::native_batch_norm_backward",
    "aten::_fused_rms_norm_backward", "aten::_softmax_backward_data",
}  # fmt: skip
# Torch computes the statistics of these norms in 16 bits where all of a norm's numbers have 16 bits.
NORMING = {f"aten::native_{kind}_norm" for kind in ("layer", "group", "batch")}
# Operators that add up overlapping windows, which torch does in 16 bits on a CPU, number by number.
ADDING = {
    "aten::avg_pool2d_backward", "aten::col2im", "aten::max_pool2d_with_indices_backward",
    "aten::max_pool3d_with_indices_backward",
}  # fmt: skip
ADDING_ON_GPU = ADDING | {"aten::avg_pool3d_backward"}  # a CPU has this operator in fp32 alone
# Operators that recur in logarithms. Each step of theirs is rounded as a logarithm of a whole path is, which is larger
# than any number that they are given or return. So torch's own kernel shows how large these roundings are in fp32.
RECURRING = {"aten::_ctc_loss", "aten::_ctc_loss_backward"}
WHOLE = {torch.float32: (torch.int32, 24), torch.float64: (torch.int64, 53)}  # the dtype of its bits, and its digits
COMPLEX = (torch.complex64, torch.complex128)
PIECE = 1 << 18  # elements that are rounded at a time: so many stay in the cache
# Operators whose results are some of the numbers that they are given, or numbers that are not rounded.
SELECTING = {
    "relu", "relu_", "threshold_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices", "cat", "stack", "index", "index_select", "gather", "embedding", "where", "masked_fill",
    "masked_fill_", "copy_", "_to_copy", "clone", "zeros", "ones", "full", "arange", "zeros_like", "ones_like",
    "full_like", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "new_ones",
    "new_full", "fill_", "zero_", "neg", "abs", "sign", "flip", "roll", "constant_pad_nd", "slice_backward",
    "select_backward", "slice_scatter", "select_scatter", "lift_fresh", "bernoulli_", "bernoulli", "rand", "randn",
    "rand_like", "randn_like", "normal_", "uniform_", "index_put_", "_index_put_impl_", "detach", "detach_",
    "_unsafe_view", "scalar_tensor", "eye", "linspace", "tril", "triu", "maximum", "minimum", "max", "min", "amax",
    "amin", "aminmax", "sort", "topk", "repeat", "complex",
}  # fmt: skip
# Arguments by which an operator selects the largest or smallest numbers, as a maximum over neighbours or a norm of inf.
# Backward looks for what was selected among what was given.
LARGEST = {"amax", "amin", math.inf, -math.inf}


def computed(func: Any, given: Any, result: Any, kinds: Collection[torch.dtype] = WHOLE) -> list[Tensor]:
    """Returns the results of an operator that a precision rounds.

    Args:
        given: its arguments, without names and with them.
        kinds: the dtypes of results that are rounded.
    """
    name = func._schema.name
    if func.is_view or name.partition("::")[2] in SELECTING:
        return []
    if any(isinstance(value, (str, float)) and value in LARGEST for value in tree_leaves(given)):
        return []
    results = result if isinstance(result, (tuple, list)) else (result,)
    alone = ("norm" in name or "attention" in name) and not name.endswith("_backward")
    results = results[:1] if alone else results  # other results are statistics, which are kept in fp32
    return [value for value in results if isinstance(value, Tensor) and value.dtype in kinds]


def convolves_in(storage: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the format in which torch sums convolutions. On a CPU for which oneDNN has no kernels in a format of
    16 bits, torch adds up in 16 bits what a convolution passes down from each place of its kernel."""
    if storage not in HALF or device.type != "cpu":
        return torch.float32
    name = f"_is_mkldnn_{dtype_name(storage)}_supported"
    has_kernels = torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, name)()
    return torch.float32 if has_kernels else storage


class Roundings(TorchDispatchMode):
    """Rounds the result of every operator while it is entered and ``on``.

    Attributes:
        sample: the number of the sample; another sample has other errors.
        scale: the loss scale; gradients are multiplied by it when fp16 rounds them. inf: fp16 rounds none to 0.
        before_bias: whether a product is rounded before its bias is added, as Keras and Flax compute it.
        convolves_in: the format in which convolutions are summed.
        cancels_in: the format in which torch computes operators whose terms cancel, and norms if it has 16 bits; None
            where each of these operators is one operation, and its result is rounded.
    """

    convolves_in = torch.float32

    def __init__(self, precision: Precision, scale: float = 1.0, before_bias: bool = False) -> None:
        super().__init__()
        self.before_bias = before_bias
        self.u, self.sample, self.on, self.backward = precision.unit_roundoff, 0, False, False
        # Autocast leaves complex numbers in complex64.
        self.kinds = {*WHOLE, *COMPLEX} if self.u == FP32.unit_roundoff else set(WHOLE)
        self.constant = False  # whether only the result is rounded, as it is stored
        self.cancels_in: torch.dtype | None = torch.float32 if self.u == FP32.unit_roundoff else None
        self.adds_in = torch_dtype(precision.storage)  # the format in which windows that overlap are added up
        self.smallest = FP16.smallest_subnormal if precision.storage == FP16 else 0.0
        self.scale = scale
        self.quantities = WeakIdKeyDictionary()  # the quantities that autograd does not see

    def passing(self, part: str) -> None:
        """Is told which part of a step begins: ``forward``, ``backward``, or a part in which nothing is rounded."""
        self.on, self.backward, self.constant = part in ("forward", "backward"), part == "backward", part == "constant"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (half := self._sums_in(func, args)) is not None:
            result = self._narrowly(func, args, kwargs or {}, half)
        elif func._schema.name in RECURRING:  # a loss, too
            result = self._narrowly(func, args, kwargs or {}, torch.float32)
        elif self.on and self.cancels_in is not None and self._is_narrow(func, args):
            result = self._narrowly(func, args, kwargs or {}, self.cancels_in)
        elif self.on and self.before_bias and func in (ADDMM, CONVOLUTION) and not kwargs:
            result = self._without_bias(func, args)
        else:
            result = func(*args, **(kwargs or {}))
        if self.on and self._is_quantity(func, args, kwargs, result) and half is None:
            with Unseen():
                for value in computed(func, (args, kwargs), result, self.kinds):
                    self.round_(value)
        return result

    def _sums_in(self, func: Any, args: Any) -> torch.dtype | None:
        """Returns the format of 16 bits in which torch adds up the result of an operator; None where it uses more."""
        if not self.on:
            return None
        adding = ADDING_ON_GPU if args and isinstance(args[0], Tensor) and args[0].is_cuda else ADDING
        kind = self.convolves_in if func in CONVOLUTIONS else self.adds_in if func._schema.name in adding else None
        return kind if kind in HALF else None

    def _is_narrow(self, func: Any, args: Any) -> bool:
        """Returns whether torch computes an operator in the format of its operands. A batch norm that keeps running
        statistics writes them, in a format of their own."""
        name = func._schema.name
        norms = name in NORMING and self.cancels_in in HALF
        return name in CANCELLING or (norms and not (name.endswith("batch_norm") and args[3] is not None))

    def _narrowly(self, func: Any, args: Any, kwargs: Any, format: torch.dtype) -> Any:
        """Returns what torch makes in a format of fewer digits. An operator of backward is given the gradient of its
        output first. This gradient is scaled as in the step: without the loss scale fp16 would not hold it."""
        backward = "backward" in func._schema.name or (func._schema.name in ADDING_ON_GPU and self.backward)
        wide, scale = args[0].dtype, self.scale if backward and format in HALF else 1.0
        if scale == math.inf:  # any that keeps the gradient in the format's range
            scale = 2.0 ** -math.frexp(float(args[0].abs().max()))[1]

        def narrow(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(format) if value.dtype is wide else value
            return format if value is wide else value

        args, kwargs = tree_map(narrow, ((args[0] * scale, *args[1:]), kwargs))
        return tree_map_only(Tensor, lambda t: t.to(wide) / scale if t.dtype is format else t, func(*args, **kwargs))

    def _without_bias(self, func: Any, args: Any) -> Tensor:
        """Returns a product that is rounded to the precision before its bias is added."""
        if func is ADDMM:
            bias, a, b = args
            return self.round_(torch.mm(a, b)).add_(bias)
        x, weight, bias, *others = args
        product: Tensor = func(x, weight, None, *others)
        if bias is None:
            return product
        return self.round_(product).add_(bias.view(-1, *(1 for _ in product.shape[2:])))

    def quantity(self, operand: Tensor) -> Tensor:
        """Notes that an operand depends on inputs or parameters, whether autograd sees it or not, and returns it."""
        self.quantities[operand] = True
        return operand

    def _is_quantity(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Returns whether a result depends on inputs or parameters. Positions and their angles do not: with rounded
        positions a network would compute another function."""
        name, enabled = func._schema.name.partition("::")[2], torch.is_grad_enabled()
        if name.endswith("_like") or name.startswith("new_"):  # it takes nothing but a shape from its arguments
            return False
        if self.backward and not enabled:
            return True
        given = [t for t in values_of(args, kwargs or {}) if isinstance(t, Tensor)]
        is_seen = enabled and func is not DETACH and any(t.requires_grad for t in given)
        depends = is_seen or any(t.requires_grad or t in self.quantities for t in given)
        if depends and not is_seen:  # as in a checkpoint, which calls its layers without gradients at first
            self.quantities.update({t: True for t in values_of((result,)) if isinstance(t, Tensor)})
        return depends

    def cast(self, value: Tensor, kind: torch.dtype, roundings: int = 1) -> Tensor:
        """Returns constants that a network has in a format of 16 bits, such as keys that go into a queue. Numbers that
        the format holds are not rounded, and quantities are rounded as they are computed. The error of several
        roundings grows with the root of their number."""
        with Unseen():
            if value in self.quantities or torch.equal(value.to(kind).to(value.dtype), value):
                return value
            return self.round_(value.clone(), math.sqrt(roundings) * torch.finfo(kind).eps / 2)

    def round_(self, value: Tensor, u: float | None = None) -> Tensor:
        """Rounds ``value`` in place to 1 / factor times the numbers of the precision, with a factor for each tensor:
        equal numbers, such as an image's background, have equal errors, and these add up.

        Args:
            u: the unit roundoff; None: the precision's.
        """
        if not value.numel():
            return value
        if value.layout is not torch.strided:
            self.round_(value._values() if value.is_sparse else value.values(), u)
            return value
        if value.is_complex():
            self.round_(torch.view_as_real(value), u)
            return value
        in_row = value.is_contiguous()
        target = value.view(-1) if in_row else value.flatten()
        factor = 2 ** self._at_random(target)
        bits, digits = WHOLE[value.dtype]
        cut = digits + round(math.log2(u or self.u))  # the number of last digits that go: u = 2^-(number that stays)
        gap = self.smallest / (self.scale if self.backward else 1.0) * factor
        for (piece,) in chunks(target, size=PIECE):
            piece.mul_(factor)
            if gap:
                piece.div_(gap).round_().mul_(gap)
            # Half a unit of the last digit that stays is added, and all below this digit is cut off. A carry runs on
            # into the exponent, as it should.
            if cut > 0:
                piece.view(bits).add_(1 << (cut - 1)).bitwise_and_(-1 << cut)
            piece.div_(factor)
        return value if in_row else value.copy_(target.view(value.shape))

    def _at_random(self, value: Tensor) -> float:
        """Returns a number from 0 to 1 that depends on the sample, and on some of the elements of ``value``."""
        some = value[:: max(1, value.numel() // SEEDS)].contiguous().cpu().numpy().tobytes()
        return random.Random(zlib.crc32(some, self.sample)).random()


@contextmanager
def in_operations(network: nn.Module) -> Iterator[None]:
    """While it is entered, recurrent layers are computed operation by operation, so that each result is rounded."""
    libraries: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
    before = [library.enabled for library in libraries]
    if any(isinstance(module, nn.RNNBase) for module in network.modules()):
        for library in libraries:
            library.enabled = False
    try:
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled
