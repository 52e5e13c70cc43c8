"""The precision of torch's own products in fp32, on every device: flags of the process, in an old style and a new one.

The old flags are ``torch.set_float32_matmul_precision`` and ``allow_tf32``, the new flags ``fp32_precision`` of torch,
of a library and of an operation, where a narrower one counts before a wider one. torch refuses to read an old flag that
does not fit the new ones. So nothing here reads an old flag, and both are set alike.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

_MKLDNN: Any = torch.backends.mkldnn  # torch's types know nothing of the operations
_CUDNN: Any = torch.backends.cudnn
# From wide to narrow.
_FLAGS: Mapping[str, Any] = {
    "torch": torch.backends,
    "mkldnn": _MKLDNN,
    "cudnn": _CUDNN,
    "cuda.matmul": torch.backends.cuda.matmul,
    "cudnn.conv": _CUDNN.conv,
    "cudnn.rnn": _CUDNN.rnn,
    "mkldnn.matmul": _MKLDNN.matmul,
    "mkldnn.conv": _MKLDNN.conv,
    "mkldnn.rnn": _MKLDNN.rnn,
}


def precisions() -> dict[str, str]:
    """Returns the precision of each library's products in fp32: ``ieee``, ``tf32``, ``bf16``, or ``none``, which is
    ``ieee``."""
    return {name: str(flag.fp32_precision) for name, flag in _FLAGS.items() if "." in name}


def are_tf32(network: nn.Module, device: torch.device) -> bool:
    """Returns whether a network has products of fp32 numbers that a GPU may compute in TF32. torch allows it that in
    convolutions and recurrent layers, if nobody forbids it."""
    if device.type != "cuda":
        return False
    kinds = {nn.modules.conv._ConvNd: "cudnn.conv", nn.RNNBase: "cudnn.rnn"}
    own = {flag for module in network.modules() for kind, flag in kinds.items() if isinstance(module, kind)}
    allowed = precisions()
    return any(allowed[flag] == "tf32" for flag in {"cuda.matmul", *own})


def set_tf32(allowed: bool) -> None:
    """Allows TF32 for fp32 products on CUDA, or lets all be IEEE's, as they are on a CPU. TF32 is a precision of its
    own: off unless asked for."""
    for flag in _FLAGS.values():
        flag.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    _MKLDNN.matmul.fp32_precision = "ieee"  # "high" allows it there, too


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows TF32, or not, until the end of the block; then every flag is as it was, whatever has set it meanwhile."""
    before, of_products, of_cudnn = {name: flag.fp32_precision for name, flag in _FLAGS.items()}, None, None
    with suppress(RuntimeError):
        of_products = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        of_cudnn = torch.backends.cudnn.allow_tf32
    set_tf32(allowed)
    try:
        yield
    finally:
        if of_products is not None:
            torch.set_float32_matmul_precision(of_products)
        if of_cudnn is not None:
            torch.backends.cudnn.allow_tf32 = of_cudnn
        for name, flag in _FLAGS.items():
            flag.fp32_precision = "none"  # the wider flag counts
            if flag.fp32_precision != before[name]:
                flag.fp32_precision = before[name]
