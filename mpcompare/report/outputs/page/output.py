"""The file ``index.html``: the answer first, and then everything that it rests on."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mpcompare.records import finite, write_atomically
from mpcompare.report import contents, digits, dtypes, inference, remarks
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures.kit import colour, dashes
from mpcompare.report.outputs import summary_md
from mpcompare.report.outputs.page import checks, figures, tables, words

PACKAGE = "mpcompare.report.outputs.page"
NAME = "index.html"
MARK = b'<meta name="generator" content="mpcompare">'
KINDS = (".csv", ".json", ".md", ".tex", ".png", ".svg", ".pdf")  # the files next to the page to which it links
QUANTITIES = {
    "difference": "|training loss - baseline's|",
    "loss": "training loss",
    "loss_scale": "loss scale",
    "grad_norm": "norm of the gradients",
}
POINTS = 1000  # steps of a curve: of longer training every n-th is shown


def is_ours(folder: Path) -> bool:
    """Returns whether the folder holds a page of an earlier report, and not anybody's."""
    try:
        return MARK in (folder / NAME).read_bytes()[:1000]
    except OSError:
        return False


def write(report: Report, folder: Path) -> None:
    """Writes the page, with links to the files that are in the folder already."""
    files = sorted((file.name for file in folder.iterdir() if file.suffix in KINDS), key=lambda name: name[::-1])
    page = render(report, files)
    write_atomically(folder / NAME, lambda unfinished: unfinished.write_text(page, encoding="utf-8"))


def render(report: Report, files: Sequence[str]) -> str:
    """Returns the page. ``files`` are the names of files next to the page, to which it links."""
    environment = Environment(
        loader=PackageLoader(PACKAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    parts = [_part(report, place) for place in range(len(report.comparisons))]
    script = Markup("\n".join(_text(name) for name in ("uplot/uPlot.iife.min.js", "static/page.js")))
    return environment.get_template("page.html.jinja").render(
        parts=parts,
        markdown="\n".join(summary_md.lines(report)),
        undrawn="" if report.is_drawn else contents.UNDRAWN,
        missing_baseline="" if report.has_baseline else report.baseline,
        data=_json([_series(comparison) for comparison in report.comparisons]),
        style=Markup("\n".join(_text(name) for name in ("uplot/uPlot.min.css", "static/page.css"))),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        uplot_licence=_text("uplot/LICENSE"),
        files=files,
        roles=dtypes.ROLES,
        axis=range(checks.LOWEST, checks.HIGHEST + 1),
    )


def _part(report: Report, place: int) -> dict[str, Any]:
    """Returns what the templates show of a comparison, by the names that they have for it."""
    comparison = report.comparisons[place]
    memory = (remarks.memory(entry) for entry in comparison.finished)
    lines = [*remarks.resumed(comparison), *remarks.timing(comparison), *filter(None, memory)]
    return {
        "comparison": comparison,
        "baselines": words.baselines(comparison),
        "glance": words.glance(comparison),
        "answers": words.answers(comparison),
        "reading": words.reading(comparison),
        "runs": tables.runs(comparison),
        "ways": tables.ways(comparison),
        "way_lines": inference.lines(comparison),
        "figures": list(figures.drawn(comparison, report, place)) if comparison.finished and report.is_drawn else [],
        "checked": [checks.CheckedRun(entry) for entry in comparison.finished if entry.verdict],
        "dtypes": tables.dtypes(comparison),
        "dtype_lines": dtypes.lines(comparison),
        "digits": tables.digits(comparison),
        "digit_lines": digits.lines(comparison),
        "lines": lines,
        "measured": tables.measured(comparison),
        "configurations": tables.configurations(comparison),
        "versions": tables.versions(comparison),
    }


def _series(comparison: Comparison) -> dict[str, Any]:
    """Returns the numbers of the finished runs by step, which a script draws; None is a step without a value."""
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
    columns = {name: by_step[name].to_numpy(dtype=float) for name in QUANTITIES}
    values = {
        name: [float(f"{value:.6g}") if np.isfinite(value) else None for value in column]
        for name, column in columns.items()
    }
    dash = [] if isinstance(style := dashes(place), str) else style[1]
    return {"label": entry.label, "colour": colour(place), "dash": dash, **values}


def _shows(run: dict[str, Any], name: str) -> bool:
    """Returns whether there is something to see: a loss scale that is always 1 is nothing to see."""
    return any(value is not None and (name != "loss_scale" or value != 1) for value in run[name])


def _json(value: Any) -> Markup:
    """Returns JSON in which nothing can end the element around it."""
    return Markup(json.dumps(finite(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _text(name: str) -> str:
    return resources.files(PACKAGE).joinpath(name).read_text(encoding="utf-8")
