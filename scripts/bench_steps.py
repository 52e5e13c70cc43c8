"""Whole training steps of all backends, taking turns in one process: who is how much faster, with the spread.

    python scripts/bench_steps.py [--device auto] [--batch 8192] [--hidden 8192] [--rounds 15] [--csv FILE]
                                  [--entrants "fused fp16" "amp fp16" ...] [--malloc default|tuned]

Every round runs a block of steps of each entrant, in rotating order, so that drift of the machine hits all alike; a
ratio is formed within a round. A block is one step on a CPU and 50 on a GPU, after some that are not timed. `--malloc
tuned` starts over with glibc's MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ raised, so that freed activations are
kept and not mapped anew in every step: most of what torch loses at large sizes on a CPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pandas as pd
import torch
from bench_ops import describe_clocks
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mpcompare.contract import Backend, BackendUnavailable
from mpcompare.entrant import entrant as train
from mpcompare.errors import InputError
from mpcompare.loss_scale import auto
from mpcompare.measure import clock as measure
from mpcompare.measure import machine
from mpcompare.measure.bystanders import Watch
from mpcompare.paths import CONF
from mpcompare.tasks import data, mlp

TUNED = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
# A backend and its precision, once where they are the same word.
ENTRANTS = {
    "cpu": ("fused bf16", "scratch bf16", "amp bf16", "amp_compile bf16", "fused fp16", "fused fp32", "fp32"),
    "cuda": ("fused fp16", "scratch fp16", "amp fp16", "amp_graph fp16", "amp_compile fp16",
             "fused bf16", "scratch bf16", "amp bf16", "fused fp32", "tf32", "fp32"),
}  # fmt: skip
# What each is measured against.
PEERS = {
    "cpu": {
        "fused bf16": ("amp bf16", "amp_compile bf16", "scratch bf16"),
        "scratch bf16": ("amp bf16",),
        "fused fp16": ("fp32", "amp fp16"),
        "fused fp32": ("fp32",),
        "amp bf16": ("fp32",),
    },
    "cuda": {
        "fused fp16": ("amp fp16", "amp_graph fp16", "amp_compile fp16", "scratch fp16", "fused bf16"),
        "scratch fp16": ("amp fp16",),
        "amp fp16": ("tf32", "fp32"),
        "amp_graph fp16": ("amp fp16",),
        "amp_compile fp16": ("amp fp16",),
        "fused bf16": ("amp bf16",),
        "scratch bf16": ("amp bf16",),
        "fused fp32": ("fp32",),
        "tf32": ("fp32",),
    },
}
WARMUP_S = 1.0  # on a GPU


def make_backend(name: str, precision: str, task: mlp.Task, params: mlp.Params, **changes: Any) -> Backend:
    """The backend that ``conf/backend/NAME.yaml`` describes, with ``changes`` to those of its options that it has."""
    if not (CONF / "backend" / f"{name}.yaml").exists():
        raise BackendUnavailable(f"there is no conf/backend/{name}.yaml")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        configured: Any = OmegaConf.to_container(compose("config", [f"backend={name}"]).backend, resolve=True)
    cls = hydra.utils.get_class(configured.pop("_target_"))
    options = {key: changes.get(key, value) for key, value in configured.items()}
    machine.set_tf32(precision == "tf32")
    return cls(params, task, precision, auto(precision), "auto", **options)


class Entrant:
    """A backend with its batches. TF32 is a switch of the process, so it is set for each turn."""

    def __init__(self, label: str, task: mlp.Task, params: mlp.Params, dataset: data.Dataset) -> None:
        self.name, self.precision = label.split()[0], label.split()[-1]
        self.backend = make_backend(self.name, self.precision, task, params)
        self.stream: Iterator[tuple[torch.Tensor, torch.Tensor]] = data.batches(dataset, task.batch_size)

    def block(self, steps: int, clock: measure.Clock) -> float:
        """Milliseconds a step."""
        machine.set_tf32(self.precision == "tf32")
        return train.time_block(self.backend, self.stream, steps, clock)[0]


def entrants(labels: list[str], task: mlp.Task, dataset: data.Dataset, clock: measure.Clock) -> dict[str, Entrant]:
    """Those that can be made and take a step here; of the others the reason is printed."""
    device = dataset.x_train.device
    params = {name: p.to(device) for name, p in mlp.init_params(task.sizes, 0).items()}
    made = {}
    for label in labels:
        try:
            entrant = Entrant(label, task, params, dataset)
            entrant.block(1, clock)
            made[label] = entrant
        except (BackendUnavailable, InputError, RuntimeError) as error:
            print(f"{label} is left out: {' '.join(str(error).split())[:300]}")
    return made


def play(racing: dict[str, Entrant], rounds: int, steps: int, device: torch.device) -> pd.DataFrame:
    """A row a block: round, entrant, ms a step, and the machine meanwhile."""
    clock, order, rows = measure.clock(device), list(racing), []
    warm, began = 0, time.perf_counter()
    while warm < 2 or (device.type == "cuda" and time.perf_counter() - began < WARMUP_S):
        for entrant in racing.values():  # compile, build, allocate, capture and fault pages in
            entrant.block(steps, clock)
        warm += 1
        began = time.perf_counter() if warm == 1 else began
    for round_ in range(rounds):
        order.append(order.pop(0))
        for label in order:
            if steps > 1:
                racing[label].block(steps // 4, clock)
            watch = Watch(device)
            watch.start()
            ms = racing[label].block(steps, clock)
            rows.append({"round": round_, "entrant": label, "ms": ms, **watch.stop()})
    return pd.DataFrame(rows)


def summary(blocks: pd.DataFrame, labels: list[str], device: torch.device) -> pd.DataFrame:
    """Times, ratios round by round, and on a GPU the clock, with the same columns."""
    times = {label: blocks[blocks["entrant"] == label] for label in labels}

    def row(label: str, peer: str, values: pd.Series, unit: str) -> dict[str, object]:
        p20, p50, p80 = np.percentile(values, (20, 50, 80))
        return {"backend": label, "against": peer, "p50": p50, "p20": p20, "p80": p80, "unit": unit}

    rows = [row(label, "", of["ms"], "ms") for label, of in times.items()]
    for label, peers in PEERS[device.type].items():
        for peer in peers:
            if label in times and peer in times:
                mine, theirs = (times[each].set_index("round")["ms"] for each in (label, peer))
                rows.append(row(label, peer, mine / theirs, "ratio"))
    if device.type == "cuda":
        rows += [
            row(label, "", of["clock_mhz"].astype(float), "MHz")
            for label, of in times.items()
            if of["clock_mhz"].notna().all()
        ]
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, help="in a block")
    parser.add_argument("--data", choices=("auto", "mnist", "digits"), default="auto")
    parser.add_argument("--entrants", nargs="+", help="backend and precision: 'fused fp16' 'amp fp16'")
    parser.add_argument("--malloc", choices=("default", "tuned"), default="default")
    parser.add_argument("--amp-fp16", action="store_true", help="also torch.amp in fp16: on a CPU 14 s a step")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.malloc == "tuned" and any(os.environ.get(k) != v for k, v in TUNED.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TUNED})  # glibc reads them at start

    device = machine.select_device(args.device)
    steps = args.steps or (50 if device.type == "cuda" else 1)
    samples = min(60000, 8 * args.batch)  # of digits; MNIST has its own number
    task = mlp.Task(784, [args.hidden], 10, "cross_entropy", args.batch, samples, lr=0.01)
    dataset = getattr(data, args.data)(task, 0).to(device)
    labels = [*(args.entrants or ENTRANTS[device.type]), *(["amp fp16"] if args.amp_fp16 else [])]
    racing = entrants(list(dict.fromkeys(labels)), task, dataset, measure.clock(device))
    if not racing:
        sys.exit("nobody can take part")
    blocks = play(racing, args.rounds, steps, device)
    table = summary(blocks, list(racing), device)
    threads = "" if device.type == "cuda" else f"{torch.get_num_threads()} threads, "
    print(f"{machine.device_name(device)}, {threads}torch {torch.__version__}")
    of = f"{args.rounds} rounds of {steps} step{'s' if steps > 1 else ''}"
    print(f"784 -> {args.hidden} -> 10, batch {args.batch}, {dataset.name}, {of}, malloc {args.malloc}")
    if device.type == "cuda":
        print(describe_clocks(blocks[["clock_mhz", "throttle"]].astype(object).to_dict("records")))
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    if args.csv:
        table.to_csv(args.csv, index=False)


if __name__ == "__main__":
    main()
