"""Whole training steps of all backends, taking turns in one process: who is how much faster, with the spread.

    python scripts/bench_steps.py [--batch 8192] [--hidden 8192] [--rounds 15] [--malloc default|tuned] [--csv FILE]

Every round runs one step of each entrant, in rotating order, so that drift of the machine hits all alike; a ratio is
formed within a round. `--malloc tuned` starts over with glibc's MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_
raised, so that freed activations are kept and not mapped anew in every step: most of what torch loses at large sizes on
a CPU.
"""

import argparse
import os
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mpcompare import data, machine, mlp, train
from mpcompare.backend import Backend
from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.fused import Fused
from mpcompare.backends.scratch import Scratch
from mpcompare.loss_scale import auto

TUNED = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
# What each is measured against.
PEERS = {
    "fused bf16": ("amp bf16", "amp bf16 compiled", "scratch bf16"),
    "scratch bf16": ("amp bf16",),
    "fused fp16": ("fp32", "amp fp16"),
    "fused fp32": ("fp32",),
    "amp bf16": ("fp32",),
}


def entrants(task: mlp.Task, with_amp_fp16: bool) -> dict[str, Backend]:
    params = mlp.init_params(task.sizes, 0)

    def make(cls: type, precision: str) -> Backend:
        return cls(params, task, precision, auto(precision), "auto")

    compiled = make(Amp, "bf16")
    compiled.model = torch.compile(compiled.model)  # type: ignore[attr-defined]
    chosen = {
        "fused bf16": make(Fused, "bf16"),
        "scratch bf16": make(Scratch, "bf16"),
        "amp bf16": make(Amp, "bf16"),
        "amp bf16 compiled": compiled,
        "fused fp16": make(Fused, "fp16"),
        "fused fp32": make(Fused, "fp32"),
        "fp32": make(Fp32, "fp32"),
    }
    return {**chosen, "amp fp16": make(Amp, "fp16")} if with_amp_fp16 else chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--malloc", choices=("default", "tuned"), default="default")
    parser.add_argument("--amp-fp16", action="store_true", help="also torch.amp in fp16: 14 s a step at 8192 x 8192")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.malloc == "tuned" and any(os.environ.get(k) != v for k, v in TUNED.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TUNED})  # glibc reads them at start

    task = mlp.Task(784, [args.hidden], 10, "cross_entropy", args.batch, 60000, lr=0.01)
    dataset = data.auto(task, 0)
    backends = entrants(task, args.amp_fp16)
    times: dict[str, list[float]] = {name: [] for name in backends}
    order = list(backends)
    for round_, (x, y) in enumerate(islice(data.batches(dataset, args.batch), args.rounds + 2)):
        order.append(order.pop(0))
        for name in order:
            start = time.perf_counter()
            train.step(backends[name], x, y)
            if round_ > 1:  # the first two compile, build, allocate and fault pages in
                times[name].append((time.perf_counter() - start) * 1e3)

    rows = []
    for name, values in times.items():
        p20, p50, p80 = np.percentile(values, (20, 50, 80))
        rows.append({"backend": name, "against": "", "p50": p50, "p20": p20, "p80": p80, "unit": "ms"})
    for name, peers in PEERS.items():
        for peer in peers:
            if name in times and peer in times:
                p20, p50, p80 = np.percentile(np.array(times[name]) / np.array(times[peer]), (20, 50, 80))
                rows.append({"backend": name, "against": peer, "p50": p50, "p20": p20, "p80": p80, "unit": "ratio"})
    table = pd.DataFrame(rows)
    print(f"{machine.device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"784 -> {args.hidden} -> 10, batch {args.batch}, {dataset.name}, {args.rounds} rounds, malloc {args.malloc}")
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    if args.csv:
        table.to_csv(args.csv, index=False)


if __name__ == "__main__":
    main()
