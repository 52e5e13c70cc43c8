"""The least error that any implementation of a precision may have: one rounding of each result.

The network is computed again, and the result of every operation in it is rounded, forward, and so is the gradient of
that result, backward: to the digits of the precision, on a grid that is stretched at random, so that several samples
have several errors (in the spirit of Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997). Autocast leaves some of
these results in fp32, such as a transformer's stream of residuals, and an implementation that rounds them is right all
the same. And where terms cancel, as they do in the gradient of a bias before a batch norm, which is 0, nothing but
these errors is left.
"""

import copy
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpcompare.contract import Batches
from mpcompare.precision import FORMATS, Precision
from mpcompare.tasks.draws import EXAMINED, seed_step, without_masks
from mpcompare.tasks.losses import Loss
from mpcompare.verdict.examine.numerics import chunks, sketch
from mpcompare.verdict.examine.oracle import rounded, rounded_batch, rows_are_independent, shares_of, unfrozen
from mpcompare.verdict.findings import RoundingError

SAMPLES = 8
SEEDS = 32  # elements of a tensor on which its error depends
ROWS = 256  # of a large batch whose rows do not depend on each other
ELEMENTS = 1 << 20  # of a large tensor, evenly spread, from which is estimated in how many dimensions its errors vary
WHOLE = {torch.float32: (torch.int32, 24), torch.float64: (torch.int64, 53)}  # its bits as a number, and its digits
PIECE = 1 << 18  # elements that are rounded at a time: they alone stay in the cache
SQUARES = 1e-25, 1e30  # sums of squares in fp32 from which nothing that counts is missing
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
# Functions whose results are some of the numbers that they are given: nothing is rounded there.
SELECTING = {
    "relu", "max_pool1d", "max_pool2d", "max_pool3d", "reshape", "flatten", "contiguous", "clone", "detach", "to",
    "float", "double", "cat", "stack", "flip", "roll", "masked_fill", "where", "pad", "gather", "index_select",
    "zeros", "ones", "arange",
}  # fmt: skip


class _Rounding(torch.autograd.Function):
    """Passes a value on, and its gradient back, both rounded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, error: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.error = error
        return error(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.error(grad), None


class Roundings(TorchFunctionMode):
    """While it is entered, the result of every torch function is rounded.

    Attributes:
        sample: its number; another one has other errors.
        calls: the modules that are being called, and whether each was called where gradients are enabled: a checkpoint
            of the older way calls its layers without them at first.
    """

    def __init__(self, u: float) -> None:
        super().__init__()
        self.u, self.sample = u, 0
        self.calls: list[bool] = []

    @contextmanager
    def inside(self, network: nn.Module) -> Iterator[None]:
        """Rounds in every call of ``network`` or of a module of it: a checkpoint calls some of them again in backward,
        where nobody else could enter the mode."""
        handles = []
        for module in network.modules():
            handles.append(module.register_forward_pre_hook(self._called, prepend=True))
            handles.append(module.register_forward_hook(self._returned, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, *_: object) -> None:
        if not self.calls:
            self.__enter__()
        self.calls.append(torch.is_grad_enabled())

    def _returned(self, *_: object) -> None:
        self.calls.pop()
        if not self.calls:
            self.__exit__(None, None, None)

    def error(self, value: Tensor, out: Tensor | None = None) -> Tensor:
        """Rounds ``value`` to 1 / factor times the numbers of the precision, with a factor for each tensor: equal
        numbers, such as those of an image's background, have equal errors, and these add up. What a checkpoint computes
        again is rounded as it was the first time, as it would be by any implementation.

        Args:
            out: a contiguous tensor for the result; None: a new one.
        """
        factor = 2 ** self._at_random(value)
        bits, digits = WHOLE[value.dtype]
        cut = digits + round(math.log2(self.u))  # the last digits, which go: u = 2^-(those that stay)
        rounded = torch.empty_like(value, memory_format=torch.contiguous_format) if out is None else out
        for result, part in chunks(rounded, value.detach(), size=PIECE):
            scaled = torch.mul(part, factor, out=result)
            # Half a unit of the last digit that stays is added, and what is below that digit is cut off; a carry runs
            # on into the exponent, as it should. An fp32 number in a network in float64 has no more digits than stay:
            # the product and the quotient round it.
            if cut > 0:
                scaled.view(bits).add_(1 << (cut - 1)).bitwise_and_(-1 << cut)
            scaled.div_(factor)
        return rounded

    def _at_random(self, value: Tensor) -> float:
        """Returns a number from 0 to 1 that depends on the sample, and on some of the elements of ``value``."""
        some = value.detach().flatten()[:: max(1, value.numel() // SEEDS)].cpu().numpy().tobytes()
        return random.Random(zlib.crc32(some, self.sample)).random()

    def _scale_of_dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> float:
        """Returns the factor by which the rounding of ``1 / (1 - p)``, one number for all elements, changes them."""
        if not training or not 0 < p < 1:
            return 1.0
        scale = torch.tensor(1 / (1 - p), dtype=torch.float64)
        return self.error(scale).item() * (1 - p)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is F.scaled_dot_product_attention and (pieces := attention_in_pieces(*args, **(kwargs or {}))):
            with self:
                return pieces()
        given = func(*args, **(kwargs or {}))
        if func in DROPOUTS:
            given = given * self._scale_of_dropout(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and (p := (kwargs or {}).get("dropout_p", 0.0)):
            given = given * self._scale_of_dropout(given, p)
        if getattr(func, "__name__", "") in SELECTING:
            return given
        stored = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}

        def result(value: object) -> object:
            if not isinstance(value, Tensor) or value.dtype not in WHOLE:
                return value
            if not value.requires_grad and self.calls[-1:] != [False]:
                return value
            is_view = value.untyped_storage().data_ptr() in stored
            return value if is_view else _Rounding.apply(value, self.error)

        return tuple(map(result, given)) if type(given) is tuple else result(given)


def attention_in_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Callable[[], Tensor] | None:
    """Returns ``scaled_dot_product_attention`` as its operations, whose results are rounded each: scores and their
    gradients sum up to 0 where a key has a bias, and nothing but their roundings is left. None where it drops out."""
    if dropout_p:
        return None

    def pieces() -> Tensor:
        keys, values, scale = k, v, options.get("scale")
        if options.get("enable_gqa"):
            keys, values = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
        scores = (q @ keys.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if is_causal else attn_mask
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf) if seen.dtype is torch.bool else scores + seen
        return scores.softmax(dim=-1) @ values

    return pieces


def rounding_errors(
    model: nn.Module, loss_fn: Loss, batches: Batches, precision: Precision, number: int = SAMPLES
) -> dict[str, RoundingError]:
    """Returns how far such errors move gradients, and buffers after the step, from rounded weights and inputs.

    Some rows of a large batch are enough where rows do not depend on each other: neither do their errors, and the mean
    over more rows has smaller ones, like the root of their number.

    Errors g - exact of a tensor, whose covariance is C, vary in ``(tr C)^2 / tr C^2`` dimensions, of which up to about
    ``numerics.SKETCH`` are told apart. Where they are many, the length of the error varies little.

    Args:
        number: that of the samples.
    """
    fine = precision.unit_roundoff > FORMATS["fp32"].unit_roundoff  # fp32 arithmetic shows errors of u
    network = rounded(model, precision).to(dtype := torch.float32 if fine else torch.float64)
    batches = [rounded_batch(x, y, precision, dtype) for x, y in batches]
    batches, share = _some_rows(network, loss_fn, batches)
    roundings = Roundings(precision.unit_roundoff)
    without_masks(network)  # so that its roundings are seen
    step = _Step(network, loss_fn, batches)
    exact = step.take()
    norms = _products(exact, exact).sqrt_().clamp_(min=1e-300)
    squares, of_some, alongs = (torch.zeros(len(step.names), dtype=torch.float64) for _ in range(3))
    sketches: dict[str, list[list[float]]] = {name: [] for name in step.names}
    gradients = len(step.named)
    room = [torch.empty_like(e, memory_format=torch.contiguous_format) for e in exact[:gradients]]
    for roundings.sample in range(number):
        with roundings.inside(network):
            again = step.take()
        again[:gradients] = map(roundings.error, again, room)  # gradients may be stored in 16 bits, too
        errors = [a.sub_(e) for a, e in zip(again, exact, strict=True)]
        squares += _products(errors, errors) / number
        alongs += (_products(errors, exact) / norms).square() / number
        some = [e.flatten()[:: max(1, -(-e.numel() // ELEMENTS))] for e in errors]
        of_some += _products(some, some) / number
        for name, short in sketch(dict(zip(step.names, some, strict=True))).items():
            sketches[name].append(short)
    numbers = zip(step.names, squares.tolist(), of_some.tolist(), alongs.tolist(), strict=True)
    return {
        name: RoundingError(
            share * math.sqrt(square), _dimensions(part, sketches[name]), number, share * math.sqrt(along)
        )
        for name, square, part, along in numbers
    }


def _some_rows(network: nn.Module, loss_fn: Loss, batches: Batches) -> tuple[Batches, float]:
    """Returns ROWS rows of a large batch whose rows are independent, and the factor from their errors to those of all;
    any other batch as it is, and 1."""
    n = sum(len(x) for x, _ in batches)
    few = [t[:8].double() if t.is_floating_point() else t[:8] for t in batches[0]]
    if n <= ROWS or not rows_are_independent(copy.deepcopy(network).double(), loss_fn, few[0], few[1]):
        return batches, 1.0
    x, y = (torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in zip(*batches, strict=True))
    return [(x[:ROWS], y[:ROWS])], math.sqrt(ROWS / n)


def _dimensions(square: float, sketches: Sequence[Sequence[float]]) -> float:
    """Returns the number of dimensions in which errors vary, from their mean square and their sketches.

    Errors of two samples are independent, so the mean square of their product is tr C^2.
    """
    samples = torch.tensor(sketches, dtype=torch.float64)
    products = torch.triu(samples @ samples.T, diagonal=1).square().sum().item() / math.comb(len(sketches), 2)
    return max(square**2 / products, 1.0) if products else 1.0


class _Step:
    """A step of a network, taken again and again from the same state.

    Attributes:
        named: the parameters that are trained.
        names: those of the tensors that the step returns, its gradients and then the floating buffers.
    """

    def __init__(self, network: nn.Module, loss_fn: Loss, batches: Batches) -> None:
        self.network, self.loss_fn, self.batches = network, loss_fn, batches
        self.named = unfrozen(network)
        self.statistics = [name for name, b in network.named_buffers() if b.is_floating_point()]
        self.names = [*self.named, *self.statistics]

    def take(self) -> list[Tensor]:
        """Returns gradients and buffers of the step."""
        network, named = self.network, self.named
        state = copy.deepcopy(dict(network.named_buffers()))
        sums: list[Tensor] = []
        seed_step(EXAMINED)
        for (x, y), share in zip(self.batches, shares_of(self.loss_fn, [y for _, y in self.batches]), strict=True):
            (self.loss_fn(network(x), y) * share).backward()  # as the oracle has it
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in named.values()]
            network.zero_grad(set_to_none=True)
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
        buffers = [network.get_buffer(name).clone() for name in self.statistics]
        for name, before in state.items():
            network.get_buffer(name).copy_(before)
        return sums + buffers


def _products(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Returns the scalar product of each pair of tensors, float64."""
    return torch.tensor([_product(a, b) for a, b in zip(some, others, strict=True)], dtype=torch.float64)


def _product(a: Tensor, b: Tensor) -> float:
    """Returns the scalar product of two tensors: sums of pieces in their own dtype, added up in float64. A piece whose
    squares may be too small or too large for fp32 is summed in float64, too."""
    total = 0.0
    for x, y in chunks(a, b):
        squares = [torch.dot(x, x).item()] if a is b else [torch.dot(z, z).item() for z in (x, y)]
        safe = all(SQUARES[0] < square < SQUARES[1] for square in squares)
        if a is b and safe:
            total += squares[0]
        else:
            total += (torch.dot(x, y) if safe else torch.dot(x.double(), y.double())).item()
    return total
