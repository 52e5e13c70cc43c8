"""GEMM against torch: every shape of a step, every dtype, taking turns in one process.

    python scripts/bench_ops.py [--batch 8192] [--hidden 8192] [--rounds 9] [--csv FILE]

Prints GFLOP/s, the share of this machine's measured peak (fp32 multiply-add for fp32 and fp16, the bf16 dot product for
bf16 where the CPU has one; the best before and after the run), and torch's time over ours, pair by pair: median and p20
to p80. torch writes into a preallocated output too. torch's fp16 product is scalar on a CPU and takes minutes at large
sizes: it is timed only up to --torch-limit GFLOP.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mpcompare import build, machine, ops
from mpcompare.backend import DTYPES


def measured_peaks() -> dict[str, float]:
    """GFLOP/s by dtype that this CPU reaches on registers alone, with torch's number of threads."""
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


def seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def bench(shape: tuple[int, int, int, str], dtype: str, rounds: int, torch_limit: float) -> dict[str, object]:
    M, K, N, trans = shape
    trans_a, trans_b = trans[0] == "T", trans[1] == "T"
    a = torch.randn((K, M) if trans_a else (M, K)).to(DTYPES[dtype])
    b = torch.randn((N, K) if trans_b else (K, N)).to(DTYPES[dtype])
    out, theirs = torch.empty(M, N, dtype=a.dtype), torch.empty(M, N, dtype=a.dtype)
    left, right = a.t() if trans_a else a, b.t() if trans_b else b
    with_torch = dtype != "fp16" or torch_limit > 2 * M * N * K / 1e9
    times = []
    for round_ in range(rounds + 1):
        mine = seconds(lambda: ops.native_gemm(a, b, out, trans_a=trans_a, trans_b=trans_b))
        other = seconds(lambda: torch.mm(left, right, out=theirs)) if with_torch else float("nan")
        if round_ > 0:  # the first packs, allocates and faults pages in
            times.append((mine, other))
    mine, other = np.array(times).T
    gflops = 2 * M * N * K / np.median(mine) / 1e9
    p20, p50, p80 = np.percentile(other / mine, (20, 50, 80))
    return {
        "shape": f"{trans} {M} x {K} x {N}",
        "dtype": dtype,
        "ms": np.median(mine) * 1e3,
        "torch ms": np.median(other) * 1e3,
        "GFLOP/s": gflops,
        "torch / ours": p50,
        "p20": p20,
        "p80": p80,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--torch-limit", type=float, default=2.0, help="GFLOP, for torch's fp16 product")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()

    ops.load("cpu")
    before = measured_peaks()
    n, h = args.batch, args.hidden
    # forward 1, dW1; forward 2, dz1, dW2 of the network 784 -> hidden -> 10
    shapes = [(n, 784, h, "NN"), (784, n, h, "TN"), (n, h, 10, "NN"), (n, 10, h, "NT"), (h, n, 10, "TN")]
    rows = [
        bench(shape, dtype, args.rounds, args.torch_limit) for dtype in ("fp32", "fp16", "bf16") for shape in shapes
    ]
    table = pd.DataFrame(rows)
    peaks = {dtype: max(before[dtype], value) for dtype, value in measured_peaks().items()}
    table.insert(5, "share of peak", table["GFLOP/s"] / table["dtype"].map(peaks))
    print(f"{machine.device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"measured peak: fp32 multiply-add {peaks['fp32']:.0f} GFLOP/s, bf16 {peaks['bf16']:.0f} GFLOP/s")
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    if args.csv:
        table.to_csv(args.csv, index=False)


if __name__ == "__main__":
    main()
