"""The report on finished runs: reads their records, compares and judges them, and lets every output be made."""

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from mpcompare.fields import AskedReport
from mpcompare.report.columns import one_line
from mpcompare.report.comparable import check_allowed
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.figures import registry
from mpcompare.report.formats import DEFAULT, check_formats
from mpcompare.report.formats import FIGURES as DRAWN
from mpcompare.report.outputs import console, data, summary_md, summary_tex
from mpcompare.report.outputs.page import output as page
from mpcompare.report.runs import UNREADABLE, Run, find_runs
from mpcompare.report.verdicts import judge_all
from mpcompare.typed import is_of

log = logging.getLogger(__name__)

Output = Callable[[Report, Path], None]  # takes a report, and the folder for its files

# The console is the first of them, and is written last, so that its answers end the output. The page is the last file:
# it links to the others.
OUTPUTS: Mapping[str, Output] = {
    "console": console.write,
    "summary_csv": data.summary_csv,
    "summary_md": summary_md.write,
    "summary_tex": summary_tex.write,
    "verdict_json": data.verdict_json,
    "figures": registry.write,
    "dtypes_csv": data.dtypes_csv,
    "digits_csv": data.digits_csv,
    "inference_csv": data.inference_csv,
    "page": page.write,
}

# Every file that an output may write.
FILES = (
    *(f"{figure}.{each}" for figure in registry.FIGURES for each in DRAWN),
    *("summary.csv", "summary.md", "summary.tex", "verdict.json", "dtypes.csv", "digits.csv", "inference.csv"),
    page.NAME,
)


def report(
    folders: Sequence[Path],
    out: Path,
    baseline: str | None = None,
    allow: Sequence[str] | None = None,
    strict: bool | None = None,
    formats: Sequence[str] | None = None,
) -> bool:
    """Compares all runs at and below ``folders``; writes the files of :data:`OUTPUTS`, and prints the table.

    Each output is made by itself: one that cannot be made costs no other.

    Args:
        folders: runs or sweeps.
        out: the folder of the files; made if it is missing.
        baseline: backend to compare with; None: the first run's setting. Where a comparison lacks this backend, its
            first finished run takes the place, and that is said.
        allow: fields of the task identity in which runs of one comparison may differ; None as for ``baseline``.
        strict: whether a run that differs is a failure; None as for ``baseline``.
        formats: the formats of the figures and of the table, as in :class:`Report`; None as for ``baseline``.

    Returns:
        Whether every run finished, every output was made, and, where ``strict``, no run differs from its reference.

    Raises:
        InputError: a folder without runs, or without one that can be read; runs that are not comparable; a format that
            is not known.
        OSError: ``out`` cannot be written.
    """
    contents = contents_of(folders, baseline, allow, formats)
    table, *files = OUTPUTS
    failed: list[Exception] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        earlier, terminal = _written(out) if page.is_ours(out) else {}, Console(stderr=True)
        with terminal.status("Drawing the figures and the page") if terminal.is_terminal else nullcontext():
            for name in files:
                if name == "page":  # it offers the files of the folder
                    _delete(out, earlier)
                failed += filter(None, [_failure(name, contents, out)])
    except OSError as error:
        failed.append(error)
    failed += filter(None, [_failure(table, contents, out)])
    if unwritable := next((error for error in failed if isinstance(error, OSError)), None):
        raise unwritable
    if (out / page.NAME).exists():
        print(f"Report: {out / page.NAME}")
    first = next(entry.run for entry in contents.entries if entry.run.result.status != UNREADABLE)
    strict = _configured(first).get("strict", False) if strict is None else strict
    complete = all(entry.ok for entry in contents.entries)
    return complete and not failed and not (strict and contents.differs)


def _written(out: Path) -> dict[str, int]:
    """Returns when each file of a report was written, in ns."""
    return {name: (out / name).stat().st_mtime_ns for name in FILES if (out / name).exists()}


def _delete(out: Path, earlier: Mapping[str, int]) -> None:
    """Deletes the files of an earlier report that have not been written again."""
    for name, _ in earlier.items() & _written(out).items():
        (out / name).unlink()


def _failure(name: str, contents: Report, out: Path) -> Exception | None:
    """Makes an output; returns the error if it cannot be made, and warns of one that is a fault of this project."""
    try:
        OUTPUTS[name](contents, out)
    except OSError as error:
        return error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        log.error(one_line(f"{name} cannot be made: {type(error).__name__}: {error} ({where.name}, {where.lineno})"))
        return error
    return None


def contents_of(
    folders: Sequence[Path],
    baseline: str | None = None,
    allow: Sequence[str] | None = None,
    formats: Sequence[str] | None = None,
) -> Report:
    """Returns the contents of the report on all runs at and below ``folders``: :func:`report` without its files."""
    if formats is not None:
        check_formats(formats)
    runs = find_runs(folders)
    configured = _configured(next(run for run in runs if run.result.status != UNREADABLE))
    baseline = str(baseline or configured.get("baseline"))
    allow = configured.get("allow", []) if allow is None else allow
    formats = configured.get("formats", DEFAULT) if formats is None else formats
    check_formats(formats)
    check_allowed(allow, [run.result.config["task"] for run in runs])
    comparisons = [comparison.judged(judge_all(comparison)) for comparison in compare(runs, baseline, allow)]
    return Report(comparisons, baseline, tuple(formats))


def _configured(run: Run) -> Mapping[str, Any]:
    """Returns the section ``report`` of a run's configuration, as far as it is one."""
    section: Any = run.result.config.get("report")
    return section if is_of(section, AskedReport) else {}
