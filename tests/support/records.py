"""Records of runs that were never taken, written by the code that writes records."""

import statistics
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mpcompare.fields import PARTS, Result
from mpcompare.race.orders import Finish
from mpcompare.records import BLOCKS, COLUMNS, EVALS, STEPS, RunRecorder

AT_START = ("task", "batch_size", "seed", "sweep")
# Parts of a result.
MEASURED = {
    "device": "cpu", "memory_model": {"inputs": {"x": 200_000}, "activations": {"z0": 900_000, "z1": 800_000}},
    "workspace_bytes": 14_000_000, "batch_bytes": 200_000, "rss_before_bytes": 9_000_000, "peak_rss_bytes": 25_000_000,
    "memory_by_op": {"aten::mm": 1_200_000, "aten::add": 300_000},
}  # fmt: skip
UNKNOWN = (
    *("host", "cpu_count", "platform", "python", "cuda", "driver", "commit", "rss_before_bytes", "peak_rss_bytes"),
    *("test_loss", "flops_per_step", "tflops", "batch_bytes", "memory_reserved_bytes", "graph_pool_bytes"),
    "workspace_bytes",
)
DONE = {"settled": True, "finished": True}
WHOLE = {"phase_ms": {"whole step": 7.5}, "phase_overhead": 0.0}


def write_run(
    folder: Path,
    backend: str,
    precision: str = "bf16",
    losses: Sequence[float] = (2.0, 1.5, 1.0),
    step_ms: float = 10.0,
    status: str = "ok",
    **more: Any,
) -> None:
    """Writes the record of a run. Its second step is skipped.

    Args:
        folder: the run's folder; it must not exist.
        losses: the loss of each step; the first step is a warm-up.
        step_ms: milliseconds a step.
        status: ``ok``, ``failed``, or ``running``: the status that a run leaves if it is killed.
        more: entries that differ from the usual ones, by the names that :func:`_config`, :func:`_write_blocks` and
            :func:`_result` have for them; ``evals``, the rows of ``evals.csv``; any other entry of the result.
    """
    folder.mkdir(parents=True)
    at_start = {"task": "t", "batch_size": 8, "seed": 0, "sweep": None}
    at_start |= {name: more.pop(name) for name in AT_START if name in more}
    config = _config(at_start["batch_size"], len(losses) if status == "ok" else 3, more)
    recorder = RunRecorder(folder, {"backend": backend, "precision": precision, **at_start, "config": config})
    if losses:
        recorder.append(STEPS, [_step(number, loss, step_ms) for number, loss in enumerate(losses, start=1)])
    for row in more.pop("evals", []):
        recorder.append(EVALS, [dict(zip(COLUMNS[EVALS], row, strict=True))])
    if status == "failed":
        recorder.add(status=status, error="precision=fp16: no", **more)
    if status == "ok":
        blocks = more.pop("blocks", [step_ms] * 10)
        rounds = _write_blocks(recorder, blocks, more)
        finish = Finish(rounds, stopped="rel_ci", half_width=0.0, seconds=1.0, race=more.pop("race", "r"), compared=1)
        result = _result(step_ms, more.pop("torch", "2.15.0")) | {"phase_sum_ms": statistics.median(blocks)}
        recorder.add(**{**result, "timing": vars(finish), "final_loss": losses[-1], **more}, status="ok")


def result_of(status: str = "ok", **known: Any) -> Result:
    """Returns a result that no file holds: its start, and each part of which a field is ``known``; what else belongs to
    such a part is as usual."""
    usual = {**_result(10.0, "2.15.0"), "module_dtypes": {}, "timing": None, "phase_sum_ms": 10.0, "final_loss": 1.0}
    start = {"backend": "amp", "precision": "bf16", "task": "t", "batch_size": 8, "seed": 0, "config": {"task": {}}}
    start |= {each.name: known[each.name] for each in fields(Result) if each.name in known}
    every = {**usual, **start, **known}
    parts = {
        name: part(**{each.name: every.get(each.name) for each in fields(part)})
        for name, part in PARTS.items()
        if any(each.name in known and each.name not in start for each in fields(part))
    }
    return Result(status=status, **start, **parts)


def _config(batch_size: int, steps: int, more: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration. Takes ``hidden``, ``lr``, ``data``, ``options`` of the backend and ``allow`` from
    ``more``."""
    return {
        "task": {
            "_target_": "Task", "model": {"_target_": "Net", "hidden": more.pop("hidden", [32])},
            "optimizer": {"_target_": "Sgd", "lr": more.pop("lr", 0.1)}, "batch_size": batch_size,
        },
        "data": {"_target_": more.pop("data", "auto")},
        "backend": more.pop("options", {}),
        "train": {"steps": steps, "warmup_steps": 0},
        "report": {"baseline": "amp", "allow": more.pop("allow", [])},
    }  # fmt: skip


def _step(number: int, loss: float, step_ms: float) -> dict[str, Any]:
    return {
        "step": number, "warmup": number == 1, "loss": loss, "loss_scale": 1.0, "skipped": number == 2,
        "clipped": False, "step_ms": step_ms,
    }  # fmt: skip


def _write_blocks(recorder: RunRecorder, blocks: Sequence[float], more: dict[str, Any]) -> int:
    """Writes blocks of one step that take so many milliseconds, and returns their number. Takes from ``more`` the cores
    that others kept busy in them, ``other_cores``, and this run in the ``waited_s`` between them, ``out_of_turn``."""
    cores, waited_s = more.pop("out_of_turn", 0.0), more.pop("waited_s", 0.1)
    load = {"other_cores": more.pop("other_cores", 0.0), "cores_between_turns": cores, "s_between_turns": waited_s}
    load |= {"cpu_s_between_turns": cores * waited_s, "read_ms": more.pop("read_ms", 0.0)}
    for number, ms in enumerate(blocks, start=1):
        recorder.append(BLOCKS, [{"round": number, "steps": 1, "step_ms": ms, "wall_ms": ms, **load, **DONE}])
    return len(blocks)


def _result(step_ms: float, torch: str) -> dict[str, Any]:
    """Returns the result of a run that has finished, with this version of torch."""
    return {
        "phase_ms": {"forward": 4.0, "backward": 5.0, "unscale": None, "step": 1.0, "update": 0.0},
        "phase_overhead": 0.01, "first_step_ms": 50.0, "construct_s": 0.5, "engine": "torch",
        "loss_scale": "NoLossScale", "not_finite": "", "dataset": "synthetic", "dataset_reason": "asked for",
        "dataset_fingerprint": "d", "initial_weights": "w", "device": "cpu", "device_name": "cpu", "threads": 2,
        "versions": {"torch": torch}, "flags": {}, "environment": {}, "final_loss_scale": 1.0, "dtypes": {},
        **dict.fromkeys(UNKNOWN), "samples_per_s": 800.0, "timed_unfinished": 0, "memory_model": {}, "memory_by_op": {},
        "step_ms_p20": step_ms - 1, "step_ms_p50": step_ms, "step_ms_p80": step_ms + 1, "peak_memory_bytes": 2_000_000,
        "peak_memory_bytes_analytic": 1_900_000, "test_accuracy": 0.5, "skipped_steps": 1,
    }  # fmt: skip
