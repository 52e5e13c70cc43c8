"""The figures as PNG files."""

from pathlib import Path

from mpcompare.report.contents import Report
from mpcompare.report.figures import dtypes, gradient_error, kit, training


def write(report: Report, folder: Path) -> None:
    """Writes each figure that has something to show."""
    folder.mkdir(parents=True, exist_ok=True)
    kit.draw(report.comparisons, folder)
    training.draw(report.comparisons, folder)
    gradient_error.draw(report.comparisons, report.verdicts, folder)
    dtypes.draw(report.comparisons, folder)
