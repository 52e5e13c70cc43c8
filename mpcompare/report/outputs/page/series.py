"""The numbers of training steps that the page draws with one cursor over all of them."""

import math
from typing import Any

import numpy as np

from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.figures.kit import colour, dashes

QUANTITIES = {
    "difference": "|training loss - baseline's|",
    "loss": "training loss",
    "loss_scale": "loss scale",
    "grad_norm": "norm of the gradients",
}
POINTS = 1000  # steps of a curve: of longer training every n-th is shown


def series(comparison: Comparison) -> dict[str, Any]:
    """Returns the numbers of the finished runs by step, for JSON; None is a step without a value."""
    steps = sorted({int(step) for entry in comparison.finished for step in entry.run.steps["step"]})
    every = math.ceil(len(steps) / POINTS) or 1
    runs = [_run(place, entry, steps[::every]) for place, entry in enumerate(comparison.finished)]
    return {
        "title": comparison.title,
        "every": every,
        "steps": steps[::every],
        "panels": {name: title for name, title in QUANTITIES.items() if any(_shows(run, name) for run in runs)},
        "runs": runs,
    }


def _run(place: int, entry: Entry, steps: list[int]) -> dict[str, Any]:
    by_step = entry.run.steps.set_index("step")
    by_step = by_step.assign(difference=math.nan if entry.is_baseline else entry.loss_diff).reindex(steps)
    values = {name: [_number(value) for value in by_step[name].to_numpy(dtype=float)] for name in QUANTITIES}
    dash = dashes(place)
    style: dict[str, Any] = {"colour": colour(place), "dash": [] if isinstance(dash, str) else dash[1]}
    return {"label": entry.label, **style, **values}


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _shows(run: dict[str, Any], name: str) -> bool:
    """Returns whether there is something to see: a loss scale that is always 1 is none."""
    return any(value is not None and (name != "loss_scale" or value != 1) for value in run[name])
