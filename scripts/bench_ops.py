"""Times the native operators and torch's: every shape of a step in every dtype, in turns within one process.

    python scripts/bench_ops.py [--device auto] [--batch 8192] [--hidden 8192] [--params 6500000 50000000] [--rounds 9]
        [--only products optimizers] [--csv FILE]

It prints for each operator GFLOP/s, the share of the measured peak, and GB/s with each input read and each output
written once. Then comes the ratio of torch's time to ours, formed pair by pair: median and p20 to p80. torch also
writes into a preallocated output.

The peak of a CPU is measured in its registers, before and after the run, and the better one counts: fp32 multiply-add
for fp32 and fp16, the bf16 dot product for bf16 if the CPU has one. The peak of a GPU is torch's product of two large
matrices. On a CPU torch's fp16 product is scalar and takes minutes at large sizes, so it is timed only up to
--torch-limit GFLOP. Operators that fuse more than a product are timed on a GPU only, and compared with torch's
operations for the same result. The optimizers' operators, for --params parameters, are timed on both.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import work
from ceilings import calls_for, copy_bytes, matmul_flops, seconds
from torch import Tensor
from work import Work

from mpcompare.dtypes import torch_dtype
from mpcompare.instruments import fp32_products, machine
from mpcompare.instruments.bystanders import Bystanders
from mpcompare.native import build, flat, ops
from mpcompare.precision import PRECISIONS

DTYPES = ("fp32", "tf32", "fp16", "bf16")  # the precisions of the products
native = torch.ops.mpcompare


def cpu_peaks() -> dict[str, float]:
    """Returns the GFLOP/s that this CPU reaches on registers alone with torch's number of threads, by dtype."""
    recipe = build.cpu_recipe()
    torch_include = recipe.arguments[recipe.arguments.index("-isystem") + 1]
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/peak"
        flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-isystem", torch_include]
        source = str(Path(__file__).with_name("peak.cpp"))
        subprocess.run([*recipe.compiler, *flags, source, "-o", program], check=True, stderr=subprocess.DEVNULL)
        printed = subprocess.run([program, str(torch.get_num_threads())], check=True, capture_output=True, text=True)
    fma, dot = map(float, printed.stdout.split())
    return {"fp32": fma, "fp16": fma, "bf16": dot or fma}


def measured_peaks(device: torch.device) -> dict[str, float]:
    """Returns the measured peak in GFLOP/s, by dtype."""
    if device.type == "cpu":
        return cpu_peaks()
    return {dtype: matmul_flops(device, dtype, 8192) / 1e9 for dtype in DTYPES}


@dataclass(frozen=True)
class Case:
    """An operator on random data, and torch's operations for the same result.

    Attributes:
        ours, theirs: one call of each; ``theirs`` is None if torch is not timed.
    """

    name: str
    shape: str
    dtype: str
    work: Work
    ours: Callable[[], object]
    theirs: Callable[[], object] | None


def products(n: int, h: int, dtype: str, device: torch.device, torch_limit: float) -> list[Case]:
    """Returns the products of the network 784 -> h -> 10: forward 1 and dW1; forward 2, dz1 and dW2."""
    shapes = {
        "a1": (n, 784, h, "NN"), "dW1": (784, n, h, "TN"),
        "logits": (n, h, 10, "NN"), "dz1": (n, 10, h, "NT"), "dW2": (h, n, 10, "TN"),
    }  # fmt: skip
    return [_product(name, shape, dtype, device, torch_limit) for name, shape in shapes.items()]


def _product(name: str, shape: tuple[int, int, int, str], dtype: str, device: torch.device, torch_limit: float) -> Case:
    M, K, N, trans = shape
    trans_a, trans_b = trans[0] == "T", trans[1] == "T"
    stored = torch_dtype(PRECISIONS[dtype].storage)
    a = torch.randn((K, M) if trans_a else (M, K), device=device).to(stored)
    b = torch.randn((N, K) if trans_b else (K, N), device=device).to(stored)
    out, theirs = torch.empty(M, N, dtype=a.dtype, device=device), torch.empty(M, N, dtype=a.dtype, device=device)
    left, right = a.t() if trans_a else a, b.t() if trans_b else b
    with_torch = device.type != "cpu" or dtype != "fp16" or torch_limit > 2 * M * N * K / 1e9
    return Case(
        name,
        f"{trans} {M} x {K} x {N}",
        dtype,
        work.gemm(M, K, N, a.itemsize),
        lambda: ops.native_gemm(a, b, out, trans_a=trans_a, trans_b=trans_b),
        (lambda: torch.mm(left, right, out=theirs)) if with_torch else None,
    )


def fused(n: int, h: int, dtype: str, device: torch.device) -> list[Case]:
    """Returns the operators of a step of backend ``fused``, on matrices with rows as ``fused`` lays them out."""
    storage = PRECISIONS[dtype].storage

    def random(rows: int, columns: int) -> Tensor:
        return flat.matrix(rows, columns, torch_dtype(storage), device).copy_(torch.randn(rows, columns, device=device))

    size = storage.bytes
    x, W1, z, dz, dW1 = random(n, 784), random(784, h), random(n, h), random(n, h), random(784, h)
    W2, da, logits, dlogits, dW2 = random(h, 10), random(n, 10), random(n, 10), random(n, 10), random(h, 10)
    b1, b2, db1, db2 = (torch.randn(width, device=device).to(x.dtype) for width in (h, 10, h, 10))
    y, loss = torch.randint(10, (n,), device=device), torch.empty((), device=device)
    master, grads = torch.randn(784, h, device=device), torch.randn(784, h, device=device).to(x.dtype)
    copies = torch.empty_like(grads) if size < 4 else None
    scale, found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    lr = torch.full((), 1e-9, device=device)

    # Each call halves the positive numbers in z, which is updated in place; the bytes read and written stay the same.
    def torch_linear_backward() -> None:
        torch.mm(z.t(), da, out=dW2)
        dz = torch.ops.aten.threshold_backward(da @ W2.t(), z, 0)
        torch.sum(dz, 0, out=db1)

    def torch_cross_entropy() -> Tensor:
        wide = logits.float().requires_grad_()
        F.cross_entropy(wide, y).backward()
        return wide.grad.to(logits.dtype).sum(0)  # type: ignore[union-attr]

    def torch_sgd() -> None:
        master.add_(grads.float(), alpha=-1e-9)
        if copies is not None:
            copies.copy_(master)

    return [
        Case("linear 1", f"linear {n} x 784 x {h}", dtype, work.linear(n, 784, h, size),
             lambda: ops.linear(x, W1, b1, z, relu=True), lambda: torch.addmm(b1, x, W1).relu_()),
        Case("linear 2", f"linear {n} x {h} x 10", dtype, work.linear(n, h, 10, size),
             lambda: ops.linear(z, W2, b2, logits), lambda: torch.addmm(b2, z, W2)),
        Case("cross_entropy", f"cross_entropy {n} x 10", dtype, work.cross_entropy(n, 10, size),
             lambda: native.cross_entropy(logits, y, dlogits, db2, loss, scale), torch_cross_entropy),
        Case("linear_backward 2", f"linear_backward {n} x {h} x 10", dtype, work.linear_backward(n, h, 10, size),
             lambda: ops.linear_backward(da, W2, z, dW2, db1), torch_linear_backward),
        Case("weight_grad 1", f"weight_grad {n} x 784 x {h}", dtype, work.gemm(784, n, h, size),
             lambda: ops.weight_grad(x, dz, dW1), lambda: torch.mm(x.t(), dz, out=dW1)),
        Case("non_finite W1", f"non_finite 784 x {h}", dtype, Work(784 * h, size * 784 * h),
             lambda: native.non_finite(grads, found_inf), lambda: grads.isfinite().all()),
        Case("sgd W1", f"sgd 784 x {h}", dtype, work.sgd(784 * h, size) + Work(0, size % 4 * 784 * h),  # and the copies
             lambda: native.sgd(master, None, copies, grads, lr, scale, found_inf, None), torch_sgd),
    ]  # fmt: skip


def optimizers(count: int, dtype: str, device: torch.device) -> list[Case]:
    """Returns the operators that update ``count`` parameters, with torch's fused optimizers to compare them with.

    torch's optimizers unscale by themselves, but take fp32 gradients only: a copy widens the gradients for them, and
    another copy casts their weights to 16 bits.
    """

    def random() -> Tensor:
        return torch.randn(count, device=device)

    grads = random().to(torch_dtype(PRECISIONS[dtype].storage))
    low, size = grads.itemsize < 4, grads.itemsize
    copies = torch.empty_like(grads) if low else None
    master, velocity, square, norm = random(), random(), random().square(), torch.zeros((), device=device).double()
    lr, step, scale, found_inf = (torch.tensor(value, device=device) for value in (1e-9, 10.0, 1.0, 0.0))

    def torch_step(optimizer: Callable[..., torch.optim.Optimizer], **rule: float) -> Callable[[], None]:
        p = torch.nn.Parameter(random())
        p.grad = wide = random()
        update = optimizer([p], lr=1e-9, fused=True, **rule)

        def run() -> None:
            if low:
                wide.copy_(grads)
            update.step()
            if copies is not None:
                copies.copy_(p.detach())

        return run

    written = Work(0, size * count if low else 0)  # the 16-bit weights
    return [
        Case("sgd", f"sgd {count}", dtype, work.sgd(count, size, momentum=True) + written,
             lambda: native.sgd(master, velocity, copies, grads, lr, scale, found_inf, None, momentum=0.9),
             torch_step(torch.optim.SGD, momentum=0.9)),
        Case("adam", f"adam {count}", dtype, work.adam(count, size) + written,
             lambda: native.adam(master, velocity, square, copies, grads, lr, step, scale, found_inf, None, beta1=0.9,
                                 beta2=0.999, eps=1e-8, weight_decay=0.01), torch_step(torch.optim.AdamW)),
        Case("grad_norm", f"grad_norm {count}", dtype, Work(3 * count, size * count),
             lambda: native.grad_norm(grads, scale, found_inf, norm),
             lambda: torch.linalg.vector_norm(grads, dtype=torch.float32)),
    ]  # fmt: skip


def bench(case: Case, device: torch.device, rounds: int) -> dict[str, object]:
    """Times the operator and torch in turns, one block of each in a round, and returns a row of the table."""
    with fp32_products.tf32(PRECISIONS[case.dtype].uses_tf32):
        mine_calls = calls_for(case.ours, device)  # the first call packs, allocates and faults pages in
        other_calls = calls_for(case.theirs, device) if case.theirs else 0
        times = [
            (
                seconds(case.ours, device, mine_calls),
                seconds(case.theirs, device, other_calls) if case.theirs else float("nan"),
            )
            for _ in range(rounds)
        ]
    mine, other = np.array(times).T
    p20, p50, p80 = np.percentile(other / mine, (20, 50, 80))
    return {
        "shape": case.shape,
        "dtype": case.dtype,
        "ms": np.median(mine) * 1e3,
        "torch ms": np.median(other) * 1e3,
        "GFLOP/s": case.work.flops / np.median(mine) / 1e9,
        "GB/s": case.work.bytes / np.median(mine) / 1e9,
        "torch / ours": p50,
        "p20": p20,
        "p80": p80,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--params", type=int, nargs="+", default=[6_500_000, 50_000_000])
    parser.add_argument("--only", nargs="+", choices=("products", "optimizers"), default=("products", "optimizers"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--torch-limit", type=float, default=2.0, help="GFLOP limit of torch's fp16 products on a CPU")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()

    device = machine.select_device(args.device)
    on_gpu = device.type == "cuda"
    ops.load(device.type)
    fp32_products.set_tf32(False)
    before, rows, clocks = measured_peaks(device), [], []
    for dtype in DTYPES:
        tf32 = PRECISIONS[dtype].uses_tf32
        if tf32 and not on_gpu:
            continue
        groups: list[Callable[[], list[Case]]] = []  # made in turn: one group's tensors at a time
        if "products" in args.only:
            groups.append(partial(products, args.batch, args.hidden, dtype, device, args.torch_limit))
            if on_gpu and not tf32:
                groups.append(partial(fused, args.batch, args.hidden, dtype, device))
        if "optimizers" in args.only and not tf32:
            groups += [partial(optimizers, count, dtype, device) for count in args.params]
        for case in chain.from_iterable(make() for make in groups):
            bystanders = Bystanders(device)
            bystanders.start()
            try:
                rows.append(bench(case, device, args.rounds))
            except RuntimeError as error:
                print(f"{case.shape} in {dtype} is left out: {' '.join(str(error).split())[:300]}")
            clocks.append(bystanders.stop())
    table = pd.DataFrame(rows)
    peaks = {dtype: max(before[dtype], value) for dtype, value in measured_peaks(device).items()}
    table.insert(5, "share of peak", table["GFLOP/s"] / table["dtype"].map(peaks))
    threads = "" if on_gpu else f"{torch.get_num_threads()} threads, "
    print(f"{machine.device_name(device)}, {threads}torch {torch.__version__}")
    if on_gpu:
        said = ", ".join(f"{dtype} {peak / 1e3:.0f}" for dtype, peak in peaks.items())
        print(f"measured peak of torch's product, 8192 x 8192 x 8192, random data, TFLOP/s: {said}")
        print(describe_clocks(clocks))
    else:
        copy = copy_bytes(device, 256) / 1e9
        print(f"copy of 256 MB: {copy:.1f} GB/s, read and written")
        print(f"measured peak: fp32 multiply-add {peaks['fp32']:.0f} GFLOP/s, bf16 {peaks['bf16']:.0f} GFLOP/s")
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    if args.csv:
        table.to_csv(args.csv, index=False)


def describe_clocks(loads: list[dict[str, float | str | None]]) -> str:
    """Returns a line on the clock of the GPU while it was timed, and on the reasons that held it back."""
    known = [float(load["clock_mhz"]) for load in loads if load["clock_mhz"] is not None]
    reasons = pd.Series([load["throttle"] for load in loads], dtype=object).dropna().value_counts(normalize=True)
    held = ", ".join(f"{reason} {100 * share:.0f} %" for reason, share in reasons.items()) or "unknown"
    clock = f"{min(known):.0f} to {max(known):.0f} MHz, median {np.median(known):.0f}" if known else "unknown"
    return f"SM clock {clock}; held back by: {held}"


if __name__ == "__main__":
    main()
