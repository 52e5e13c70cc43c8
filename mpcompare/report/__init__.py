"""The comparison of finished runs: a table and figures. Reads records only; knows no backend by name."""

from collections.abc import Sequence
from pathlib import Path

from mpcompare.records import find_runs
from mpcompare.report import figures, table
from mpcompare.report.comparable import check_allowed
from mpcompare.report.comparison import compare


def report(folders: Sequence[Path], out: Path, baseline: str | None = None, allow: Sequence[str] | None = None) -> bool:
    """Compares all runs at and below ``folders``; prints the table and writes it, with the figures, into ``out``.

    Args:
        folders: runs or sweeps.
        out: gets ``summary.csv``, ``loss.png``, ``step_time.png``, ``phases.png`` and
            ``memory.png``; made if it is missing.
        baseline: backend to compare with; None is what the first run was configured with. Where a comparison lacks
            it, its first finished run takes its place, and that is said.
        allow: fields of the task identity in which runs of one comparison may differ; None as for ``baseline``.

    Returns:
        Whether every run finished.

    Raises:
        InputError: a folder without runs, a run that cannot be read, or runs that are not comparable.
        OSError: ``out`` cannot be written.
    """
    runs = find_runs(folders)
    configured = runs[0].result["config"].get("report")
    configured = configured if isinstance(configured, dict) else {}
    baseline = baseline or configured.get("baseline")
    allow = configured.get("allow", []) if allow is None else allow
    check_allowed(allow, dict.fromkeys(key for run in runs for key in run.result["config"]["task"]))
    comparisons = compare(runs, str(baseline), allow)
    table.show(comparisons)
    if not any(run.result["backend"] == baseline for run in runs):
        print(f"report.baseline={baseline} is not among the runs: compared with the first that finished")
    out.mkdir(parents=True, exist_ok=True)
    table.write(comparisons, out / "summary.csv")
    figures.draw(comparisons, out)
    print(f"Report: {out}")
    return all(entry.ok for comparison in comparisons for entry in comparison.entries)
