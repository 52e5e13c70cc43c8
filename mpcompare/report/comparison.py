"""Which runs may stand in one comparison, what each is called there, and what it is compared with."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mpcompare.intervals import Interval, ratio, unpaired_ratio
from mpcompare.records import Run

# Runs are compared only where all of these are equal; runs that failed early know the first two only.
SAME = ("task_config", "seed", "dataset_fingerprint", "initial_weights", "device_name")


@dataclass(frozen=True)
class Entry:
    """A run in a comparison.

    Attributes:
        label: its name there: backend and precision, and whatever else tells it from the others.
        baseline: the run that it is compared with; itself for a baseline; None if it failed or nothing finished.
    """

    run: Run
    label: str
    baseline: Run | None

    @property
    def ok(self) -> bool:
        return self.run.result["status"] == "ok"

    @property
    def is_baseline(self) -> bool:
        return self.baseline is self.run

    @property
    def error(self) -> str:
        """Why the run did not finish, in one line; empty if it did."""
        if self.ok:
            return ""
        return self.run.result.get("error") or "ended without a word: killed, or still running"

    @property
    def side_by_side(self) -> bool:
        """Whether this run and its baseline took turns, so that their ratio is free of the machine's drift."""
        if self.baseline is None or self.is_baseline:
            return self.is_baseline
        mine, theirs = (run.result["timing"]["race"] for run in (self.run, self.baseline))
        return mine is not None and mine == theirs

    @cached_property
    def speedup(self) -> Interval:
        """Step time of the baseline over this run's, median and 95 % interval: of the ratios round by round where the
        two took turns, else of the two medians; nan where there is none."""
        if not self.ok or self.baseline is None:
            return Interval(math.nan, math.nan, math.nan)
        if self.is_baseline:
            return Interval(1.0, 1.0, 1.0)
        mine, theirs = (run.blocks.set_index("round")["step_ms"] for run in (self.run, self.baseline))
        if not self.side_by_side:
            return unpaired_ratio(theirs.to_list(), mine.to_list())
        rounds = mine.index.intersection(theirs.index)
        return ratio(theirs[rounds].to_list(), mine[rounds].to_list())

    @property
    def max_abs_loss_diff(self) -> float:
        """Largest difference of the training loss to the baseline's at the same step, over the steps both have."""
        difference = self.loss_diff
        return float(difference.max()) if len(difference) else float("nan")

    @property
    def loss_diff(self) -> np.ndarray:
        """``|loss - baseline's loss|`` step by step."""
        if not self.ok or self.baseline is None:
            return np.array([])
        mine, theirs = self.run.steps["loss"].to_numpy(), self.baseline.steps["loss"].to_numpy()
        common = min(len(mine), len(theirs))
        return np.abs(mine[:common] - theirs[:common])


@dataclass
class Comparison:
    """Runs of one task on the same data from the same weights on one device."""

    title: str
    dataset: str
    entries: list[Entry] = field(default_factory=list)


def compare(runs: Sequence[Run], baseline: str) -> list[Comparison]:
    """Sorts ``runs`` into comparisons and finds each run's baseline: backend ``baseline``, in the same precision if it
    is there; where that backend is missing, the first run that finished."""
    return [_comparison(group, baseline) for group in _groups(runs)]


def _identity(run: Run) -> dict[str, Any]:
    config = run.result["config"]
    return {**run.result, "task_config": json.dumps(config["task"], sort_keys=True)}


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    groups: list[list[Run]] = []
    # Finished runs first: they know most about themselves.
    for run in sorted(runs, key=lambda run: run.result["status"] != "ok"):
        mine = _identity(run)
        for group in groups:
            theirs = _identity(group[0])
            if all(mine[key] == theirs[key] for key in SAME if key in mine and key in theirs):
                group.append(run)
                break
        else:
            groups.append([run])
    order = {id(run): place for place, run in enumerate(runs)}
    groups = [sorted(group, key=lambda run: order[id(run)]) for group in groups]
    return sorted(groups, key=lambda group: order[id(group[0])])


def _comparison(runs: Sequence[Run], baseline: str) -> Comparison:
    finished = [run for run in runs if run.result["status"] == "ok"]
    known = (finished or runs)[0].result
    comparison = Comparison(
        title=f"{known['task']}, batch {known['batch_size']}, seed {known['seed']}, "
        f"{known.get('device_name', 'no device')}",
        dataset=f"{known['dataset']}: {known['dataset_reason']}" if "dataset" in known else "no data",
    )
    preferred = [run for run in finished if run.result["backend"] == baseline] or finished[:1]
    for run, label in zip(runs, _labels(runs), strict=True):
        same_precision = [b for b in preferred if b.result["precision"] == run.result["precision"]]
        candidates = same_precision or preferred
        comparison.entries.append(Entry(run, label, candidates[0] if run in finished else None))
    return comparison


def _labels(runs: Sequence[Run]) -> list[str]:
    """Backend and precision (once where they are the same word); where that is not enough, also engine, loss scale,
    and in the end the folder."""
    keys = ["backend", "precision"]
    for more in ("engine", "loss_scale", None):
        labels = [" ".join(dict.fromkeys(str(run.result.get(key, "")) for key in keys)).strip() for run in runs]
        if len(set(labels)) == len(labels) or more is None:
            break
        keys.append(more)
    return [
        f"{label} [{run.name}]" if labels.count(label) > 1 else label for run, label in zip(runs, labels, strict=True)
    ]
