"""The calls of a network in a step in float64. A cast of its own, such as ``x.float()``, would throw away half of the
digits, and the next layer takes no fp32 numbers then."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpcompare.verdict.examine.in_full import IN_FULL

WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
WIDE |= {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


def call_widened(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """Calls a function of torch. In float64 one that asks for narrower numbers gets float64, or complex128."""
    func = IN_FULL.get(func, func)
    if dtype is not torch.float64:
        return func(*args, **kwargs)
    if func in CASTS:
        return args[0].to(dtype)
    args = tuple(WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
    if kwargs.get("dtype") in WIDE:
        kwargs = {**kwargs, "dtype": WIDE[kwargs["dtype"]]}
    return func(*args, **kwargs)


def widened(network: nn.Module) -> nn.Module:
    """Lets a network whose weights are in float64, now or later, be called so; returns it."""
    entered: list[_Widened] = []

    def enter(module: nn.Module, _: Any) -> None:
        entered.append(mode := _Widened(next((p.dtype for p in module.parameters()), torch.float32)))
        mode.__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    network.register_forward_pre_hook(enter)
    network.register_forward_hook(leave, always_call=True)
    return network


class _Widened(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_widened(func, args, kwargs or {}, self.dtype)
