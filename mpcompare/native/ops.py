"""The native operators, which are built and loaded on first use. And the choice between their gemm and plain torch.

``torch.ops.mpcompare`` has them. csrc/ops.cpp holds their schemas, csrc/gemm.hpp and csrc/fused.hpp say what each does.
The operators that take torch's settings as arguments have a function here. The CPU and the CUDA part are libraries
of their own, so that a CPU build needs nothing of CUDA.
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from mpcompare.errors import InputError, check_choice
from mpcompare.native.build import BuildError, build, cpu_recipe, cuda_recipe

log = logging.getLogger(__name__)
ENGINES = ("auto", "native", "torch")
WRITING = (  # the operators around gemm, which write into their arguments
    "linear", "weight_grad", "linear_backward", "cross_entropy", "mse", "non_finite", "grad_norm", "sgd", "adam",
    "update_scale",
)  # fmt: skip


# C = alpha op(A) op(B) + beta C, fp32 accumulation, with the arguments of torch_gemm; the contract is in csrc/gemm.hpp.
Gemm = Callable[..., None]


def native_gemm(a: Tensor, b: Tensor, out: Tensor, **how: float) -> None:
    """``Gemm`` by ``torch.ops.mpcompare.gemm``; raises RuntimeError where shapes, dtypes or strides are off.

    One argument more is ``fp16_sums=True``: operands, result and also the sums are fp16; on a GPU only.
    """
    torch.ops.mpcompare.gemm(a, b, out, **how)


def torch_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> None:
    """``Gemm`` in plain torch: operands are widened to fp32, which gives the same numerics at the speed of an fp32
    ``product``."""
    result = alpha * product((a.t() if trans_a else a).float(), (b.t() if trans_b else b).float())
    out.copy_(result if beta == 0 else result + beta * out.float())  # beta = 0 never reads out


BLOCK = 16  # products that a tensor core takes at once, 4 to 16 by generation; their sum is exact or nearly so


def low_product(a: Tensor, b: Tensor, accumulate: torch.dtype) -> Tensor:
    """Returns the product of fp32 matrices, summed as tensor cores with 16-bit accumulators do: BLOCK products at once
    are summed in fp32, and each such sum is added to a total in the dtype ``accumulate``, rounded every time."""
    total = a.new_zeros(len(a), b.shape[1], dtype=accumulate)
    for of_a, of_b in zip(a.split(BLOCK, dim=1), b.split(BLOCK), strict=True):
        total.add_(of_a @ of_b)  # torch adds fp32 and 16 bits in fp32, then rounds
    return total.float()


def low_gemm(accumulate: torch.dtype) -> Gemm:
    """Returns a ``Gemm`` in plain torch whose products are accumulated in the dtype ``accumulate``."""
    return functools.partial(torch_gemm, product=functools.partial(low_product, accumulate=accumulate))


def linear(x: Tensor, w: Tensor, bias: Tensor, out: Tensor, *, relu: bool = False) -> None:
    """``out = x w + bias``, or relu of it: ``[n, in] [in, out] + [out] -> [n, out]``, rounded once."""
    torch.ops.mpcompare.linear(x, w, bias, out, relu=relu, **_choices())


def weight_grad(z: Tensor, da: Tensor, dw: Tensor) -> None:
    """``dw = z^T da``: ``[n, in]^T [n, out] -> [in, out]``."""
    torch.ops.mpcompare.weight_grad(z, da, dw, **_choices())


def linear_backward(da: Tensor, w: Tensor, z: Tensor, dw: Tensor, dbias: Tensor) -> None:
    """``dw = z^T da``, then ``z = da w^T where z > 0 else 0`` in place, ``[n, out] [in, out]^T -> [n, in]``; ``dbias``
    its column sums."""
    torch.ops.mpcompare.linear_backward(da, w, z, dw, dbias, **_choices())


def _choices() -> dict[str, bool]:
    """Returns torch's settings for products on a GPU.

    ``search`` finds the fastest algorithm by timing; another run may find another one, with other bits. ``tf32`` rounds
    fp32 operands to TF32.
    """
    return {
        "search": not torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
    }


def clip_factor(norm: Tensor, factor: Tensor, *, max_norm: float, infinity: bool = False) -> None:
    """Writes the factor by which ``torch.nn.utils.clip_grad_norm_`` multiplies gradients into an fp32 scalar:
    ``factor = min(1, max_norm / (total + 1e-6))``, with the ``total`` norm of the gradients from what :func:`grad_norm`
    has left in ``norm``. NaN stays NaN."""
    total = norm if infinity else norm.sqrt()
    factor.copy_((max_norm / (total + 1e-6)).clamp(max=1))


def workspaces(device_type: str) -> dict[str, int]:
    """Returns the bytes that products hold to compute in, by the name of the workspace; empty where there are none.

    On a CPU they are the buffers in which operands are packed, over all threads. These lie outside of torch's
    allocator, and stay at the size of the largest product so far.
    """
    operators, on_cpu = torch.ops.mpcompare, device_type == "cpu"
    size = operators.workspace_bytes() if on_cpu else operators.lt_workspace_bytes()
    return {"packing buffers" if on_cpu else "cublasLt": size} if size else {}


def select_gemm(
    engine: str, device: torch.device, dtype: torch.dtype, accumulate: torch.dtype = torch.float32
) -> tuple[str, Gemm]:
    """Returns the engine that will be used, and its gemm for operands of ``dtype``.

    A gemm that sums in less than fp32 is plain torch, except for fp16 on a GPU, whose tensor cores can do it. ``auto``
    takes ``torch``, with a warning, if the native operators cannot be built. Raises InputError where there is no such
    engine, it cannot sum in ``accumulate``, or ``native`` cannot be built."""
    check_choice("engine", engine, ENGINES)
    fp16_sums = accumulate is dtype is torch.float16 and device.type == "cuda"
    if accumulate is not torch.float32 and not fp16_sums and engine == "native":
        raise InputError("engine", engine, "sums in fp32; to sum in 16 bits takes one of auto, torch")
    gemm = torch_gemm if accumulate is torch.float32 else low_gemm(accumulate)
    if engine == "torch" or (accumulate is not torch.float32 and not fp16_sums):
        return "torch", gemm
    try:
        load(device.type)
    except BuildError as error:
        if engine == "native":
            raise InputError("engine", engine, f"{error}; or use engine=torch") from error
        log.warning("engine=auto: using torch, slower, because the native operators are not available: %s", error)
        return "torch", gemm
    return "native", functools.partial(native_gemm, fp16_sums=True) if fp16_sums else native_gemm


def load(device_type: str) -> None:
    """Builds, if needed, and loads the operators for ``cpu`` or ``cuda``. Raises BuildError now, and again in every
    later call of this process without another try."""
    for part in ("cpu", "cuda") if device_type == "cuda" else ("cpu",):
        if error := _load_once(part):
            raise error


@functools.cache
def _load_once(part: str) -> BuildError | None:
    try:
        library = build(cpu_recipe() if part == "cpu" else cuda_recipe(gpu_arch()))
    except BuildError as error:
        return error
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return BuildError(f"{library} does not load, delete it to build it again: {error}")
    _register_fakes()
    if part == "cpu" and torch.ops.mpcompare.amx() == 2:
        log.warning("this CPU has AMX, but bf16 products do without: Linux refused it, or MPCOMPARE_AMX=0 is set")
    return None


@functools.cache  # once: older torch refuses a second registration
def _register_fakes() -> None:
    torch.library.register_fake("mpcompare::gemm")(_fake_gemm)
    for name in WRITING:  # they return nothing
        torch.library.register_fake(f"mpcompare::{name}")(lambda *_, **__: None)


def gpu_arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _fake_gemm(a: Tensor, b: Tensor, out: Tensor, *, trans_a: bool = False, trans_b: bool = False, **_: float) -> None:
    """Checks shapes for torch.compile; the operator writes ``out`` and returns nothing."""
    M, K = a.t().shape if trans_a else a.shape
    K_b, N = b.t().shape if trans_b else b.shape
    torch._check(K_b == K and out.shape == (M, N), lambda: "gemm: shapes do not match")
