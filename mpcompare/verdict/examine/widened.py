"""Casts that a network makes itself, in a step in float64: ``x.float()`` would throw away half of its digits, and the
next layer takes no fp32 numbers then."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


def widened(network: nn.Module) -> nn.Module:
    """Lets a network whose weights are in float64, now or later, ask for numbers of a narrower format and get float64;
    returns it."""
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
        kwargs = kwargs or {}
        if self.dtype is not torch.float64:
            return func(*args, **kwargs)
        if func in CASTS:
            return args[0].to(self.dtype)
        args = tuple(self.dtype if isinstance(a, torch.dtype) and a in NARROW else a for a in args)
        if kwargs.get("dtype") in NARROW:
            kwargs = {**kwargs, "dtype": self.dtype}
        return func(*args, **kwargs)
