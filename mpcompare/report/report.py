"""The comparison of finished runs: verdicts, a table, figures. Reads records only; knows no backend by name."""

from collections.abc import Sequence
from pathlib import Path

from mpcompare.records import find_runs
from mpcompare.report import dtypes, inference
from mpcompare.report.comparable import check_allowed
from mpcompare.report.comparison import compare
from mpcompare.report.figures import dtypes as dtype_figure
from mpcompare.report.figures import gradient_error as verdict_figures
from mpcompare.report.figures import kit as figures
from mpcompare.report.figures import training as training_figure
from mpcompare.report.outputs import console as table
from mpcompare.verdict.judge import verdict


def report(
    folders: Sequence[Path],
    out: Path,
    baseline: str | None = None,
    allow: Sequence[str] | None = None,
    strict: bool | None = None,
) -> bool:
    """Compares all runs at and below ``folders``; prints the table and writes it, with the figures, into ``out``.

    Args:
        folders: runs or sweeps.
        out: gets ``summary.csv``, ``verdict.json``, ``loss.png``, ``step_time.png``, ``phases.png``,
            ``memory.png``, ``training.png``, ``dtypes.csv``, ``dtypes.png``, ``inference.csv`` and the
            figures of :mod:`mpcompare.report.figures.gradient_error`; made if it is missing.
        baseline: backend to compare with; None is what the first run was configured with. Where a comparison lacks
            it, its first finished run takes its place, and that is said.
        allow: fields of the task identity in which runs of one comparison may differ; None as for ``baseline``.
        strict: whether a run that differs is a failure; None as for ``baseline``.

    Returns:
        Whether every run finished, and, where ``strict``, none differs from its reference.

    Raises:
        InputError: a folder without runs, a run that cannot be read, or runs that are not comparable.
        OSError: ``out`` cannot be written.
    """
    runs = find_runs(folders)
    configured = runs[0].result["config"].get("report")
    configured = configured if isinstance(configured, dict) else {}
    baseline = baseline or configured.get("baseline")
    allow = configured.get("allow", []) if allow is None else allow
    strict = configured.get("strict", False) if strict is None else strict
    check_allowed(allow, [run.result["config"]["task"] for run in runs])
    comparisons = compare(runs, str(baseline), allow)
    verdicts = {name: v for comparison in comparisons for name, v in verdict.judge(comparison).items()}
    table.show(comparisons, verdicts)
    if not any(run.result["backend"] == baseline for run in runs):
        print(f"report.baseline={baseline} is not among the runs: compared with the first that finished")
    out.mkdir(parents=True, exist_ok=True)
    table.write(comparisons, verdicts, out / "summary.csv")
    verdict.write(verdicts, out / "verdict.json")
    figures.draw(comparisons, out)
    training_figure.draw(comparisons, out)
    verdict_figures.draw(comparisons, verdicts, out)
    dtypes.write(comparisons, out / "dtypes.csv")
    dtype_figure.draw(comparisons, out)
    inference.write(comparisons, out / "inference.csv")
    print(f"Report: {out}")
    differs = strict and any(v.word == "differs" for v in verdicts.values())
    return not differs and all(entry.ok for comparison in comparisons for entry in comparison.entries)
