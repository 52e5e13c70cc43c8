"""The comparison as a table: ``summary.csv`` for programs, the console for people."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpcompare.phases import WHOLE_STEP
from mpcompare.race.turns import describe_timing
from mpcompare.records import write_atomically
from mpcompare.report import dtypes, inference
from mpcompare.report.comparison import Comparison, Entry, phases_of
from mpcompare.verdict.judge.verdict import Verdict

TOLERANCE = 0.05  # a measured peak further than this from the analytic model is named


Verdicts = Mapping[str, Verdict]  # by the run's name


def summary(comparisons: Sequence[Comparison], verdicts: Verdicts) -> pd.DataFrame:
    """A row a run; times in ms, memory in bytes; empty cells for what a failed run does not have."""
    return pd.DataFrame(
        [
            {**_row(entry), "not_the_same": comparison.not_the_same or None, **_verdict(verdicts.get(entry.run.name))}
            for comparison in comparisons
            for entry in comparison.entries
        ]
    )


def _row(entry: Entry) -> dict[str, object]:
    result = entry.run.result
    difference = entry.max_abs_loss_diff  # nan of a run that diverged is a result, not an empty cell
    timing = result.get("timing", {})
    copied = ("backend", "engine", "precision", "dataset", "step_ms_p20", "step_ms_p50", "step_ms_p80")
    return {
        **{key: result.get(key) for key in copied},
        "speedup_vs_baseline": entry.speedup.median,
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "final_loss": result.get("final_loss"),
        "max_abs_loss_diff_vs_baseline": str(difference) if entry.ok and not math.isfinite(difference) else difference,
        "test_accuracy": result.get("test_accuracy"),
        "baseline": entry.baseline.name if entry.baseline else None,
        "speedup_low": entry.speedup.low,
        "speedup_high": entry.speedup.high,
        "side_by_side": entry.side_by_side if entry.ok else None,
        **{key: timing.get(key) for key in ("rounds", "stopped")},
        **{f"{phase.replace(' ', '_')}_ms": ms for phase, ms in result.get("phase_ms", {}).items()},
        **{key: result.get(key) for key in ("phase_overhead", "construct_s", "first_step_ms")},
        "peak_memory_bytes_analytic": result.get("peak_memory_bytes_analytic"),
        "loss_scale": result.get("loss_scale"),
        "skipped_steps": result.get("skipped_steps"),
        "task": result.get("task"),
        "batch_size": result.get("batch_size"),
        "seed": result.get("seed"),
        "device_name": result.get("device_name"),
        "status": result["status"],
        "error": entry.error or None,
        "run": entry.run.name,
        "variant": entry.variant or None,
        "workspace_bytes": result.get("workspace_bytes"),
        "peak_rss_bytes": result.get("peak_rss_bytes"),
        "environment": environment(result) or None,
        "resumed_from": _resumed(result) or None,
    }


def _verdict(verdict: Verdict | None) -> dict[str, str | None]:
    if verdict is None:
        return {"verdict": None, "cause": None}
    return {"verdict": verdict.word, "cause": verdict.cause or None}


def write(comparisons: Sequence[Comparison], verdicts: Verdicts, path: Path) -> None:
    """Writes :func:`summary` as CSV."""
    write_atomically(path, lambda unfinished: summary(comparisons, verdicts).to_csv(unfinished, index=False))


def show(comparisons: Sequence[Comparison], verdicts: Verdicts) -> None:
    """Prints a table for each comparison; below it why runs differ or failed, what could not be checked of others,
    which began at a checkpoint, the time of each phase, what the trained networks are worth in each precision, and
    whose memory is not the model's."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no width: do not wrap at 80
    for comparison in comparisons:
        console.print(Text(comparison.title, style="bold"))
        console.print(Text(comparison.dataset))
        if comparison.not_the_same:
            console.print(Text(comparison.not_the_same, style="bold red"))
        console.print(_table(comparison, verdicts, width=console.width))
        for entry in comparison.entries:
            if (verdict := verdicts.get(entry.run.name)) and verdict.because:
                console.print(Text(f"{entry.label} {verdict}: {verdict.because}"), soft_wrap=True)
        for line in (*unchecked_lines(comparison, verdicts), *resumed_lines(comparison)):
            console.print(Text(line), soft_wrap=True)
        for line in _timing_lines(comparison):
            console.print(Text(line))
        for line in dtypes.lines(comparison):
            console.print(Text(line), soft_wrap=True)
        if any(entry.ok for entry in comparison.entries):
            console.print(_phases(comparison, narrow=console.width < 100))
        if inference.measured(comparison):
            console.print(inference.shown(comparison, narrow=console.width < 120))
            for line in inference.lines(comparison):
                console.print(Text(line))
        for entry in comparison.entries:
            if not entry.ok:
                console.print(Text(f"{entry.label}: {entry.run.result['status']}: {entry.error}", style="red"))
            elif abs(entry.model_difference) > TOLERANCE:
                console.print(Text(_memory_difference(entry), style="yellow"), soft_wrap=True)


def unchecked_lines(comparison: Comparison, verdicts: Verdicts) -> list[str]:
    """What could not be looked at of runs that are the same or within noise: a line for those of which it is alike."""
    whose: dict[str, list[str]] = {}
    for entry in comparison.entries:
        verdict = verdicts.get(entry.run.name)
        if verdict and verdict.unchecked and verdict.word in ("same", "within noise"):
            whose.setdefault(", ".join(verdict.unchecked), []).append(entry.label)
    return [f"{', '.join(labels)}: not checked: {what}" for what, labels in whose.items()]


def resumed_lines(comparison: Comparison) -> list[str]:
    """Which runs continued from a checkpoint: a line for those that continued from the same one."""
    whose: dict[str, list[str]] = {}
    for entry in comparison.entries:
        if where := _resumed(entry.run.result):
            whose.setdefault(where, []).append(entry.label)
    return [f"{', '.join(labels)}: resumed from {where}" for where, labels in whose.items()]


def _resumed(result: Mapping[str, Any]) -> str:
    """``step 10 of amp bf16 (outputs/long)``; empty where training began at its beginning."""
    if not (found := result.get("resumed_from")):
        return ""
    column = " ".join(dict.fromkeys(str(found[key]) for key in ("backend", "precision")))
    return f"step {found['step']} of {column} ({found['path']})"


def percent(difference: float) -> str:
    """``+1.5 %``; ``-`` for nan. Never -0.0."""
    return "-" if math.isnan(difference) else f"{round(100 * difference, 1) + 0.0:+.1f} %"


def _memory_difference(entry: Entry) -> str:
    """How far the measured peak is from the model, and which operators' memory was live at that moment."""
    result = entry.run.result
    difference = result["peak_memory_bytes"] - result["peak_memory_bytes_analytic"]
    share = abs(100 * entry.model_difference)
    side = "above" if difference > 0 else "below"
    held = [f"{op} {size / 1e6:.1f} MB" for op, size in list((result.get("memory_by_op") or {}).items())[:3]]
    text = f"{entry.label}: measured {abs(difference) / 1e6:.1f} MB ({share:.1f} %) {side} the model"
    return f"{text}; most of the peak: {', '.join(held)}" if held else text


def _speedup(entry: Entry) -> str:
    if entry.is_baseline:
        return "1.00"
    return str(entry.speedup) + ("" if entry.side_by_side else "~")


def _timing_lines(comparison: Comparison) -> list[str]:
    """How the times came about: when timing stopped, and what disturbed it."""
    finished = [entry for entry in comparison.entries if entry.ok]
    timings = {entry.label: describe_timing(entry.run.result["timing"]) for entry in finished}
    same = len(set(timings.values())) == 1
    lines = list(timings.values())[:1] if same else [f"{label}: {text}" for label, text in timings.items()]
    if not all(entry.side_by_side for entry in finished):
        lines.append("~ not timed in turns with its baseline: drift of the machine is in the ratio")
    out_of_turn = {entry.label: _out_of_turn(entry) for entry in finished}
    lines += [
        f"{label}: kept {cores:.2g} cores busy in the turns of others (OpenMP does with OMP_WAIT_POLICY=active)"
        for label, cores in out_of_turn.items()
        if cores
    ]
    for entry in finished:
        rivals = (rival for rival in finished if rival is not entry and _race(rival) == _race(entry))
        others = entry.run.blocks["other_cores"].median() - sum(out_of_turn[rival.label] for rival in rivals)
        if others > 0.25:
            lines.append(f"{entry.label}: other programs kept {others:.1f} cores busy while it was timed")
    return [*lines, *_environment_lines(comparison)]


# Variables of the environment that make the same program faster or slower. Others torch sets itself: KMP_INIT_AT_FORK.
_SPEED = (
    *("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "GOMP_", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_", "ONEDNN_"),
    *("DNNL_", "CUBLAS", "NVIDIA_TF32", "CUDA_LAUNCH_BLOCKING", "PYTORCH_"),
)


def environment(result: Mapping[str, Any]) -> str:
    """Those of ``_SPEED`` that were set for a run, as ``NAME=VALUE NAME=VALUE``."""
    found: Mapping[str, str] = result.get("environment") or {}
    return " ".join(f"{name}={value}" for name, value in found.items() if name.startswith(_SPEED))


def _environment_lines(comparison: Comparison) -> list[str]:
    """What the environment had set: one line where that is the same for all runs."""
    known = {e.label: environment(e.run.result) for e in comparison.entries if "environment" in e.run.result}
    if len(set(known.values())) == 1:
        return [f"environment: {text}" for text in list(known.values())[:1] if text]
    return [f"{label}: environment: {text or 'nothing set'}" for label, text in known.items()]


# Of a core. Ratios are known within 2 % (measure.rel_ci), and that much of a core can shift them by as much. An entrant
# that waits uses 0.0004, and 0.002 where its blocks take 10 ms: the messages between two turns.
OUT_OF_TURN = 0.02


def _out_of_turn(entry: Entry) -> float:
    """How many cores the entrant kept busy while others had their turns; 0 where it waited, or had none to wait for."""
    cores = entry.run.blocks["cores_between_turns"].median()
    return float(cores) if _race(entry) and cores > OUT_OF_TURN else 0.0


def _race(entry: Entry) -> str | None:
    race: str | None = entry.run.result["timing"]["race"]
    return race


def _phases(comparison: Comparison, narrow: bool) -> Table:
    """Milliseconds of each phase, ``-`` where it holds no work, or the step has no phases; and what is not in the step
    time: the first step's milliseconds and the seconds that making the backend took, builds and compilation
    included."""
    finished = [entry for entry in comparison.entries if entry.ok]
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms in phase", no_wrap=True)
    for phase in (phases := phases_of(entry.run for entry in finished)):
        table.add_column(phase, justify="right")
    for header in () if narrow else ("clock's cost", "first step", "set-up s"):
        table.add_column(header, justify="right")
    for entry in finished:
        times = entry.run.result["phase_ms"]
        cells = ["-" if times.get(phase) is None else f"{times[phase]:.4g}" for phase in phases]
        overhead, first, set_up = (entry.run.result[key] for key in ("phase_overhead", "first_step_ms", "construct_s"))
        clock = "-" if WHOLE_STEP in times else f"{overhead:+.1%}"
        more = () if narrow else (clock, f"{first:.4g}", f"{set_up:.2g}")
        table.add_row(entry.label, *cells, *more)
    return table


def _table(comparison: Comparison, verdicts: Verdicts, width: int) -> Table:
    """All columns, or, where the terminal is narrow, those that matter most; summary.csv has them all."""
    labels = {id(entry.run): entry.label for entry in comparison.entries}
    baselines = list(dict.fromkeys(labels[id(e.baseline)] for e in comparison.entries if e.baseline))
    versus = baselines[0] if len(baselines) == 1 and len(baselines[0]) < 16 else "baseline"
    columns: dict[str, Callable[[Entry, dict[str, Any]], str]] = {
        "backend": lambda e, r: r["backend"],
        "precision": lambda e, r: r["precision"],
        "variant": lambda e, r: e.variant,
        "engine": lambda e, r: r.get("engine", ""),
        "ms/step p50": lambda e, r: f"{r['step_ms_p50']:.4g}",
        "p20 - p80": lambda e, r: f"{r['step_ms_p20']:.4g} - {r['step_ms_p80']:.4g}",
        f"x {versus}": lambda e, r: _speedup(e),
        "peak MB": lambda e, r: f"{r['peak_memory_bytes'] / 1e6:.4g}",
        "vs model": lambda e, r: percent(e.model_difference),
        "final loss": lambda e, r: f"{float(r['final_loss']):.5f}",
        f"max |loss - {versus}|": lambda e, r: "baseline" if e.is_baseline else f"{e.max_abs_loss_diff:.1e}",
        "test acc.": lambda e, r: "-" if r["test_accuracy"] is None else f"{r['test_accuracy']:.4f}",
        "verdict": lambda e, r: str(verdicts[e.run.name]),
    }
    if len(baselines) > 1:
        columns["baseline"] = lambda e, r: labels[id(e.baseline)]
    if not any(entry.variant for entry in comparison.entries):
        del columns["variant"]
    if width < 160:
        for header in ("engine", "p20 - p80", "vs model", "final loss", "test acc."):
            del columns[header]
    if width < 100:
        del columns[f"max |loss - {versus}|"]
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for header in columns:
        words = header in ("backend", "precision", "variant", "engine", "verdict", "baseline")
        table.add_column(
            header, justify="left" if words else "right", no_wrap=not header.startswith(("max", "verdict"))
        )
    for entry in comparison.entries:
        result = entry.run.result
        cells = list(columns.values())
        if entry.ok:
            table.add_row(*(cell(entry, result) for cell in cells))
        else:
            known = {"backend": result["backend"], "precision": result["precision"], "variant": entry.variant}
            table.add_row(*(known[header] for header in known if header in columns), result["status"], style="red")
    return table
