"""The file ``verdict.json``: by run the verdict, and every check with its value and limit."""

from pathlib import Path
from typing import Any

from mpcompare.records import write_json
from mpcompare.report.contents import Report
from mpcompare.report.outputs.files import path_in
from mpcompare.verdict.judge.check import Check


def write(report: Report, folder: Path) -> None:
    """Writes ``verdict.json`` into ``folder``."""
    document = {
        name: {**vars(verdict), "checks": [_check(check) for check in verdict.checks]}
        for name, verdict in report.verdicts.items()
    }
    write_json(path_in(folder, "verdict.json"), document, indent=2)


def _check(check: Check) -> dict[str, Any]:
    return {"name": check.name, **vars(check), "passed": check.passed}
