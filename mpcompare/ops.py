"""The native operators as Python functions: typed wrappers, and the choice between them and plain torch.

csrc/ops.cpp holds the schemas; the CPU and the CUDA part are libraries of their own, so that a CPU build needs nothing
of CUDA. They are built and loaded when they are first asked for.
"""

import functools
import logging
from typing import Protocol

import torch
from torch import Tensor

from mpcompare.build import BuildError, build, cpu_recipe, cuda_recipe
from mpcompare.errors import InputError, check_choice

log = logging.getLogger(__name__)
ENGINES = ("auto", "native", "torch")


class Gemm(Protocol):
    """C = alpha op(A) op(B) + beta C, fp32 accumulation; the contract is in csrc/gemm.hpp."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None: ...


def native_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """:class:`Gemm` by ``torch.ops.mpcompare.gemm``; raises RuntimeError where shapes, dtypes or strides are off."""
    torch.ops.mpcompare.gemm(a, b, out, trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta)


def torch_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """:class:`Gemm` in plain torch: operands widened to fp32, so the same numerics, at the speed of an fp32 product."""
    product = (a.t() if trans_a else a).float() @ (b.t() if trans_b else b).float()
    _store(product, out, alpha, beta)


def _store(product: Tensor, out: Tensor, alpha: float, beta: float) -> None:
    """``out = alpha product + beta out`` of an fp32 ``product``; ``beta = 0`` never reads ``out``."""
    out.copy_(alpha * product if beta == 0 else alpha * product + beta * out.float())


BLOCK = 16  # products that a tensor core takes at once, 4 to 16 by generation; their sum is exact or nearly so


def low_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    accumulate: torch.dtype,
) -> None:
    """:class:`Gemm` but for its accumulation, which is as tensor cores with 16-bit accumulators have it: products are
    summed in fp32 by the BLOCK, and each such sum is added to a total in ``accumulate``, rounded every time."""
    a, b = (a.t() if trans_a else a).float(), (b.t() if trans_b else b).float()
    total = torch.zeros_like(out, dtype=accumulate)
    for of_a, of_b in zip(a.split(BLOCK, dim=1), b.split(BLOCK), strict=True):
        total.add_(of_a @ of_b)  # fp32 + 16 bits is added in fp32, then rounded
    _store(total.float(), out, alpha, beta)


def linear(x: Tensor, w: Tensor, bias: Tensor, out: Tensor, *, relu: bool = False) -> None:
    """``out = x w + bias``, or relu of it: ``[n, in] [in, out] + [out] -> [n, out]``, rounded once."""
    torch.ops.mpcompare.linear(x, w, bias, out, relu=relu)


def relu_backward(da: Tensor, w: Tensor, z: Tensor, dbias: Tensor) -> None:
    """``z = da w^T where z > 0 else 0`` in place, ``[n, out] [in, out]^T -> [n, in]``; ``dbias`` its column sums."""
    torch.ops.mpcompare.relu_backward(da, w, z, dbias)


def cross_entropy(
    logits: Tensor, y: Tensor, dlogits: Tensor, dbias: Tensor, loss: Tensor, *, loss_scale: float = 1.0
) -> None:
    """Mean cross-entropy of ``logits`` ``[n, c]`` for classes ``y`` ``[n]`` into the fp32 scalar ``loss``, the gradient
    of ``loss_scale * loss`` into ``dlogits``, its column sums into ``dbias``; in fp32 throughout."""
    torch.ops.mpcompare.cross_entropy(logits, y, dlogits, dbias, loss, loss_scale=loss_scale)


def mse(output: Tensor, y: Tensor, doutput: Tensor, dbias: Tensor, loss: Tensor, *, loss_scale: float = 1.0) -> None:
    """Mean squared error over all elements of ``output`` ``[n, c]``; else like :func:`cross_entropy`."""
    torch.ops.mpcompare.mse(output, y, doutput, dbias, loss, loss_scale=loss_scale)


def sgd(
    master: Tensor,
    velocity: Tensor | None,
    params: Tensor | None,
    grad: Tensor,
    *,
    lr: float,
    momentum: float = 0.0,
    inv_scale: float = 1.0,
) -> None:
    """``v = momentum v + inv_scale grad; master -= lr v; params = master, rounded``: one pass over memory."""
    torch.ops.mpcompare.sgd(master, velocity, params, grad, lr=lr, momentum=momentum, inv_scale=inv_scale)


def workspace_bytes() -> int:
    """Bytes in which the CPU operators keep packed operands, over all threads: beside torch's allocator, and kept from
    call to call at the size of the largest; 0 before the first product."""
    # Asked of torch, not of the cache of load(): it is torch that knows what is loaded.
    return torch.ops.mpcompare.workspace_bytes() if hasattr(torch.ops.mpcompare, "workspace_bytes") else 0


def select_gemm(engine: str, device: torch.device, accumulate: torch.dtype = torch.float32) -> tuple[str, Gemm]:
    """The engine that will be used and its gemm; one that sums in less than fp32 is plain torch.

    ``native`` raises InputError where it cannot be built; ``auto`` then takes ``torch``, with a warning that says so.
    """
    check_choice("engine", engine, ENGINES)
    if accumulate is not torch.float32:
        if engine == "native":
            raise InputError("engine", engine, "sums in fp32; to sum in 16 bits takes one of auto, torch")
        return "torch", functools.partial(low_gemm, accumulate=accumulate)
    if engine == "torch":
        return "torch", torch_gemm
    try:
        load(device.type)
    except BuildError as error:
        if engine == "native":
            raise InputError("engine", engine, f"{error}; or use engine=torch") from error
        log.warning("engine=auto: using torch, slower, because the native operators are not available: %s", error)
        return "torch", torch_gemm
    return "native", native_gemm


def load(device_type: str) -> None:
    """Builds, if needed, and loads the operators for ``cpu`` or ``cuda``.

    Raises:
        BuildError: now, and again in every later call of this process without another try.
    """
    for part in ("cpu", "cuda") if device_type == "cuda" else ("cpu",):
        if error := _load_once(part):
            raise error


@functools.cache
def _load_once(part: str) -> BuildError | None:
    try:
        library = build(cpu_recipe() if part == "cpu" else cuda_recipe(_gpu_arch()))
    except BuildError as error:
        return error
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return BuildError(f"{library} does not load, delete it to build it again: {error}")
    _register_fakes()
    return None


@functools.cache  # once: older torch refuses a second registration
def _register_fakes() -> None:
    torch.library.register_fake("mpcompare::gemm")(_fake_gemm)
    for name in ("linear", "relu_backward", "cross_entropy", "mse", "sgd"):  # they write arguments, return nothing
        torch.library.register_fake(f"mpcompare::{name}")(lambda *_, **__: None)


def _gpu_arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _fake_gemm(a: Tensor, b: Tensor, out: Tensor, *, trans_a: bool = False, trans_b: bool = False, **_: float) -> None:
    """Shape rules for torch.compile; the operator writes ``out`` and returns nothing."""
    M, K = a.t().shape if trans_a else a.shape
    K_b, N = b.t().shape if trans_b else b.shape
    torch._check(K_b == K and out.shape == (M, N), lambda: "gemm: shapes do not match")
