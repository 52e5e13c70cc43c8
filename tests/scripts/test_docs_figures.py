"""The program that makes the kept files of the documents anew, in small sizes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import docs_numbers
import pytest
from matplotlib.figure import Figure
from support.command import SMALL

from mpcompare.report.formats import save_figure

SCRIPT = docs_numbers.ROOT / "scripts" / "docs_figures.sh"


def figures(docs, *arguments):
    environment = {**os.environ, "DOCS": str(docs), "PYTHON": sys.executable}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_parts_are_made_anew_and_give_the_numbers_of_their_pages(tmp_path):
    ended = figures(tmp_path, "pitfalls", "default", *SMALL, "verdict.noise=1")
    assert ended.returncode == 0, ended.stderr
    kept = docs_numbers.ROOT / "docs"
    printed = Path("pitfalls/output.txt")
    assert docs_numbers.output(tmp_path / printed) == docs_numbers.output(kept / printed)
    assert {file.name for file in (kept / "default").iterdir()} <= {
        file.name for file in (tmp_path / "default").iterdir()
    }
    page = (kept / "measuring.md").read_text()
    assert docs_numbers.written(page, tmp_path) != page
    assert {each.name for each in tmp_path.iterdir()} == {"pitfalls", "default"}


def test_the_line_on_a_figure_is_kept_out_of_each_output(tmp_path, capsys):
    save_figure(Figure(), tmp_path / "a.png")
    patterns = re.findall(r"grep -v '(.*?)'", SCRIPT.read_text())
    printed = capsys.readouterr().out
    assert len(patterns) == 3
    assert all(re.match(pattern, printed) for pattern in patterns)


def test_an_unknown_part_is_said_in_one_line(tmp_path):
    ended = figures(tmp_path, "default", "defautl")
    assert ended.returncode == 2
    assert ended.stderr.startswith("defautl: expected pitfalls, footprint, scalers, first_look")
    assert not any(tmp_path.iterdir())
