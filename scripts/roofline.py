"""Draws a roofline: the time of each operator and each phase of a step, and two measured ceilings of the device.

    python scripts/roofline.py --csv roofline.csv --png roofline.png [--device auto] [--precision auto]
                               [--backends fused scratch amp] [--batch 8192] [--hidden 8192] [--data auto]

A point is work over time: flops and bytes are counted from shapes (scripts/work.py), and the time is measured.
An operator below the roof has moved more bytes than it must, or has waited. An operator above the slope has found its
data in a cache. The ceilings are a large matrix product by torch and a copy within the device's memory, both of random
data. `fused` is timed phase by phase, and also as one graph, as it runs on a GPU by default.
"""

import argparse
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import work
from backend_of import DATA, load, make_backend, mnist_mlp
from bench_ops import DTYPES, Case, fused, products
from ceilings import copy_bytes, matmul_flops, median_seconds
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from work import Work

from mpcompare.contract import PHASES, BackendUnavailable, Stepper, in_one_piece, warmup_steps
from mpcompare.entrant import timing
from mpcompare.entrant.phases import time_phases
from mpcompare.errors import InputError
from mpcompare.instruments import clock as clocks
from mpcompare.instruments import fp32_products, machine
from mpcompare.native import ops
from mpcompare.precision import PRECISIONS, resolve_precision
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.mlp import plain_mlp
from mpcompare.tasks.task import Task

BLOCK_S = 0.1
# Backends have Okabe and Ito's colours, and phases have shapes, so that each can be told apart without the other.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MARKERS = {"forward": "o", "backward": "s", "unscale to update": "^", "whole step": "*"}


def ceilings(device: torch.device, size: int, megabytes: int) -> dict[str, float]:
    """Returns the measured flop/s by precision, and the bytes/s under ``copy``."""
    precisions = DTYPES if device.type == "cuda" else ("fp32", "bf16")  # torch's fp16 is scalar on a CPU
    found = {p: matmul_flops(device, p, size) for p in precisions}
    found.setdefault("fp16", found["fp32"])  # a CPU multiplies fp16 in fp32
    return {**found, "copy": copy_bytes(device, megabytes)}


def row(kind: str, backend: str, name: str, ms: float, done: Work, roof: dict[str, float], precision: str) -> dict:
    """Returns a point as a row of the table.

    ``share of roof`` is the least time that the ceilings allow, over the measured time.
    """
    floor_s = max(done.flops / roof[precision], done.bytes / roof["copy"])
    return {
        "kind": kind, "backend": backend, "name": name, "precision": precision, "ms": ms, "flops": done.flops,
        "bytes": done.bytes, "intensity": done.intensity, "TFLOP/s": done.flops / ms / 1e9,
        "TB/s": done.bytes / ms / 1e9, "share of roof": floor_s * 1e3 / ms,
    }  # fmt: skip


def op_rows(cases: list[Case], device: torch.device, roof: dict[str, float]) -> list[dict]:
    """Returns a row for each operator that can be run."""
    rows = []
    for case in cases:
        try:
            ms = median_seconds(case.ours, device) * 1e3
        except RuntimeError as error:
            print(f"{case.name} is left out: {' '.join(str(error).split())[:300]}")
            continue
        rows.append(row("op", "", case.name, ms, case.work, roof, case.dtype))
    return rows


def phase_rows(
    name: str, precision: str, task: Task, dataset: Dataset, roof: dict[str, float], label: str, **changes: Any
) -> list[dict]:
    """Returns a row for each phase of ``work.phases``, and one for the step, timed in blocks without a clock inside."""
    device = dataset.x_train.device
    model = task.new_model(0, device)
    backend, mlp = make_backend(name, precision, model, task, **changes), plain_mlp(model, task)
    stepper = Stepper(backend, task.new_rates())
    stream, clock = ([batch] for batch in batches(dataset, task.batch_size)), clocks.clock(device)
    timing.time_block(stepper, stream, max(3, warmup_steps(backend) + 1), clock)  # compiles, searches, captures
    steps = timing.try_block(stepper, stream, BLOCK_S, clock).steps
    whole = float(np.median([timing.time_block(stepper, stream, steps, clock).step_ms for _ in range(5)]))
    found = row("phase", label, "whole step", whole, work.step(mlp, precision), roof, precision)
    if in_one_piece(backend):
        return [found]
    phase_ms = time_phases(stepper, stream, steps, clock, task).phase_ms
    parts = {"forward": PHASES[:1], "backward": PHASES[1:2], "unscale to update": PHASES[2:]}
    times = {part: sum(phase_ms[phase] or 0.0 for phase in of) for part, of in parts.items()}
    counts = work.phases(mlp, precision)
    return [*(row("phase", label, part, times[part], counts[part], roof, precision) for part in parts), found]


def draw(table: pd.DataFrame, roof: dict[str, float], precision: str, title: str) -> Figure:
    """Returns the figure: the roof of ``precision``, and a point for each row of ``table``."""
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    axes = figure.subplots()
    peak, copy = roof[precision] / 1e12, roof["copy"] / 1e12
    low, high = table["intensity"].min() / 2, max(table["intensity"].max() * 15, 4 * peak / copy)  # room for names
    x = np.geomspace(low, high, 200)
    axes.plot(x, np.minimum(peak, copy * x), color="black", linewidth=1.5, zorder=1)
    text = f"{precision} product of large matrices: {peak:.3g} TFLOP/s"
    axes.annotate(text, (peak / copy, peak), (-6, 0), ha="right", va="center", textcoords="offset points", fontsize=8)
    start = 1.2 * low  # the end of the slope where points are fewest
    axes.annotate(f"copy: {copy:.3g} TB/s", (start, copy * start), (8, -4), textcoords="offset points", fontsize=8)
    backends = list(dict.fromkeys(table.loc[table["kind"] == "phase", "backend"]))
    colours = dict(zip(backends, COLOURS, strict=False))
    for point in table.to_dict("records"):
        if point["kind"] == "op":
            axes.plot(point["intensity"], point["TFLOP/s"], "x", color="0.35", markersize=6, zorder=2)
            continue
        marker = MARKERS[point["name"]]
        size = 11 if marker == "*" else 7
        axes.plot(
            point["intensity"], point["TFLOP/s"], marker, color=colours[point["backend"]], markersize=size,
            markeredgecolor="white", markeredgewidth=0.5, zorder=3,
        )  # fmt: skip
    _name_ops(axes, table[table["kind"] == "op"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity in FLOP/byte: each input read once, each output written once")
    axes.set_ylabel("achieved TFLOP/s")
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    drawn = [name for name in MARKERS if name in set(table["name"])]
    handles = [Line2D([], [], color=colours[b], marker="o", linestyle="", label=b) for b in backends]
    handles += [Line2D([], [], color="0.2", marker=MARKERS[n], linestyle="", label=n) for n in drawn]
    handles += [Line2D([], [], color="0.35", marker="x", linestyle="", label="an operator alone")]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _name_ops(axes: Axes, points: pd.DataFrame) -> None:
    """Writes the names of operators to the right of their points, or below if another point is there.

    Points that lie together share one label.
    """
    groups: list[list[dict[Hashable, Any]]] = []
    for point in points.sort_values("TFLOP/s", ascending=False).to_dict("records"):
        beside = (group for group in groups if _near(group[0], point, 1.5))
        if group := next(beside, None):
            group.append(point)
        else:
            groups.append([point])
    for group in groups:
        at = group[0]
        to_the_right = [other[0] for other in groups if other[0]["intensity"] > 1.2 * at["intensity"]]
        taken = any(_near(at, other, 4) for other in to_the_right)
        label = axes.annotate(
            ", ".join(point["name"] for point in group),
            (at["intensity"], at["TFLOP/s"]),
            (0, -12) if taken else (9, -3),
            ha="center" if taken else "left",
            textcoords="offset points",
            fontsize=7,
            color="0.35",
            zorder=2,  # behind the points of the phases
        )
        label.set_path_effects([withStroke(linewidth=2, foreground="white")])


def _near(a: dict[Hashable, Any], b: dict[Hashable, Any], factor: float) -> bool:
    return all(1 / factor < a[key] / b[key] < factor for key in ("intensity", "TFLOP/s"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--backends", nargs="+", default=["fused", "scratch", "amp"])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--data", choices=DATA, default="auto")
    parser.add_argument("--size", type=int, help="rows and columns of the matrices of the ceiling")
    parser.add_argument("--megabytes", type=int, help="size of the copied tensor in MB")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()

    device = machine.select_device(args.device)
    precision = resolve_precision(args.precision, DTYPES, device.type, "any")
    on_gpu = device.type == "cuda"
    ops.load(device.type)
    roof = ceilings(device, args.size or (8192 if on_gpu else 2048), args.megabytes or (4096 if on_gpu else 256))
    fp32_products.set_tf32(PRECISIONS[precision].uses_tf32)
    cases = products(args.batch, args.hidden, precision, device, 0) + fused(args.batch, args.hidden, precision, device)
    rows = op_rows(cases, device, roof)
    del cases
    task = mnist_mlp(args.batch, args.hidden)
    dataset = load(args.data, args.batch).to(device)
    for name in args.backends:
        variants: list[tuple[str, dict[str, Any]]] = [(name, {"graph": False})]
        if name == "fused" and on_gpu:
            variants.append(("fused, one graph", {}))
        for label, changes in variants:
            try:
                rows += phase_rows(name, precision, task, dataset, roof, label, **changes)
            except (BackendUnavailable, InputError, RuntimeError) as error:
                print(f"{label} is left out: {' '.join(str(error).split())[:300]}")
    table = pd.DataFrame(rows)
    title = (
        f"784 -> {args.hidden} -> 10, batch {args.batch}, {precision}, {dataset.name}, {machine.device_name(device)}"
    )
    draw(table, roof, precision, title).savefig(args.png, dpi=150)
    reached = [
        {"kind": "ceiling", "name": f"product, {p}", "precision": p, "TFLOP/s": roof[p] / 1e12}
        for p in roof
        if p in DTYPES
    ]
    reached.append({"kind": "ceiling", "name": "copy", "TB/s": roof["copy"] / 1e12})
    everything = pd.concat([pd.DataFrame(reached), table])[list(table.columns)]
    everything.to_csv(args.csv, index=False)
    print(title)
    products_said = ", ".join(f"{p} {roof[p] / 1e12:.4g}" for p in DTYPES if p in roof)
    print(f"ceilings: product of large matrices in TFLOP/s: {products_said}; copy {roof['copy'] / 1e12:.3g} TB/s")
    shown = table[["backend", "name", "ms", "intensity", "TFLOP/s", "TB/s", "share of roof"]]
    print(shown.to_string(index=False, float_format=lambda value: f"{value:.3g}"))


if __name__ == "__main__":
    main()
