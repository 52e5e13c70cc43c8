"""The calls of a network in a step in float64. A cast of the network's own, such as ``x.float()``, would throw away
half of the digits, and the next layer, in float64, takes no fp32 numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from mpcompare.dtypes import HALF

WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
WIDE |= {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "linear", "einsum"}
CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}


def grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the products of the experts of a mixture, as ``torch.nn.functional.grouped_mm`` does.

    Args:
        a: [rows, K], where each expert has some rows; or [experts, rows, K].
        b: [experts, K, N]; or [K, N], where each expert has some columns. With two matrices each has a part of K.
        offs: the end of each expert's part [experts]; None where there are no parts.
        bias: is added to each product.
        out_dtype: the dtype of the result; None: the dtype of the operands.
    """
    if offs is None:
        found = a @ b
    else:
        ends = offs.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]

        def parts(t: Tensor, dim: int) -> Any:
            return t.narrow(dim, 0, ends[-1]).split(sizes, dim) if t.dim() == 2 else t

        if a.dim() == b.dim() == 2:
            found = torch.stack([x @ y for x, y in zip(parts(a, 1), parts(b, 0), strict=True)])
        else:
            dim = 0 if a.dim() == 2 else 1
            found = torch.cat([x @ y for x, y in zip(parts(a, 0), parts(b, 1), strict=True)], dim)
            nobody = (a.shape[0] if dim == 0 else b.shape[1]) - ends[-1]
            found = torch.nn.functional.pad(found, (0, 0, 0, nobody) if dim == 0 else (0, nobody))
    found = found if bias is None else found + bias
    return found if out_dtype is None else found.to(out_dtype)


def values_of(args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Any]:
    """Yields the arguments of a function of torch, also from within lists and tuples. Pytrees know more containers, but
    took a sixth of the time of a replay."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from values_of(value)
        else:
            yield value


def rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Returns what torch's norm of this name makes of numbers in 16 or 32 bits. Without an eps it takes fp32's."""
    return torch.rms_norm(input, normalized_shape, weight, torch.finfo(torch.float32).eps if eps is None else eps)


# For functions of torch that have no kernel for float64, or another eps there: functions that compute in any dtype.
IN_FULL: dict[Any, Callable[..., Any]] = {
    torch._grouped_mm: grouped_product,
    torch.rms_norm: rms_norm,
    nn.functional.rms_norm: rms_norm,
}


def call_widened(func: Any, args: Any, kwargs: Any, dtype: torch.dtype, stored: torch.dtype | None = None) -> Any:
    """Calls a function of torch. In float64 a function that asks for narrower numbers gets float64, or complex128.

    Args:
        stored: the format of 16 bits of a step that is replayed in fp32. A function that asks for this format gets its
            numbers, in fp32. A function that asks for the other format of 16 bits gets fp32. None: no step is replayed
            in fp32.
    """
    result = _widely(IN_FULL.get(func, func), args, kwargs, dtype, stored)
    # In the step a cast of a queue in 16 bits is a copy. The network may write into the queue before backward, and
    # backward needs the old numbers.
    is_cast = func in (*CASTS, Tensor.double) or (
        func in (Tensor.to, Tensor.type, Tensor.type_as)
        and any(isinstance(kind, (torch.dtype, Tensor)) for kind in (*args[1:], *kwargs.values()))
    )
    return result.clone() if is_cast and result is args[0] and not result.requires_grad else result


def _widely(func: Any, args: Any, kwargs: Any, dtype: torch.dtype, stored: torch.dtype | None) -> Any:
    if dtype is not torch.float64 and stored is None:
        return func(*args, **kwargs)
    wide = WIDE if dtype is torch.float64 else {half: dtype for half in HALF if half is not stored}
    if func in CASTS:
        return args[0].to(wide.get(CASTS[func], CASTS[func])).to(dtype)
    if getattr(func, "__name__", "") in PRODUCTS:  # other functions take numbers of two formats
        kinds = {t.dtype for t in values_of(args, kwargs) if isinstance(t, Tensor)}
        if dtype in kinds and kinds & wide.keys():
            args, kwargs = tree_map_only(Tensor, lambda t: t.to(wide.get(t.dtype, t.dtype)), (args, kwargs))
    args = tuple(wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
    if kwargs.get("dtype") in wide:
        kwargs = {**kwargs, "dtype": wide[kwargs["dtype"]]}
    result, given = func(*args, **kwargs), values_of(args, kwargs)
    kind = getattr(result, "dtype", None)
    # Torch makes fp32 numbers from none, and from whole numbers. A function takes no others with such numbers.
    is_made = kind is torch.float32 and not any(isinstance(v, Tensor) and v.is_floating_point() for v in given)
    return result.to(dtype) if kind in HALF or is_made else result


def asked_of(func: Any, args: Any, kwargs: Any) -> set[torch.dtype]:
    """Returns the formats of 16 bits that a function is asked for."""
    asked = {a for a in (CASTS.get(func), *args, *kwargs.values()) if isinstance(a, torch.dtype)}
    return asked.intersection(HALF)


def widened(network: nn.Module) -> nn.Module:
    """Lets a network whose weights are in float64, now or later, be called in float64, and returns the network."""
    entered: list[Widened] = []

    def enter(module: nn.Module, _: Any) -> None:
        entered.append(mode := Widened(next((p.dtype for p in module.parameters()), torch.float32)))
        mode.__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    network.register_forward_pre_hook(enter)
    network.register_forward_hook(leave, always_call=True)
    return network


class Widened(TorchFunctionMode):
    """While it is entered, functions of torch are called in ``dtype``, as :func:`call_widened` calls them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_widened(func, args, kwargs or {}, self.dtype)


def requires_gradient(value: Tensor) -> bool:
    """Returns whether a tensor requires a gradient. Within ``torch.vmap`` a tensor of a batch does not say so."""
    while torch._C._functorch.is_batchedtensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value.requires_grad
