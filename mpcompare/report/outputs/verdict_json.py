"""The file ``verdict.json``: by run the verdict, and every check with its value and limit."""

from pathlib import Path

from mpcompare.report.contents import Report
from mpcompare.report.outputs.files import path_in
from mpcompare.verdict.judge import verdict


def write(report: Report, folder: Path) -> None:
    verdict.write(report.verdicts, path_in(folder, "verdict.json"))
