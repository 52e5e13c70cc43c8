"""The draw of bugs is by hash, and each drawn bug is in a loop."""

import csv

import pytest
from watch.drawn import BUGS_LEFT_OUT, DRAWN, NUMBER, THEMES_LEFT_OUT, draw, hash_of, kept, why_left_out


def test_the_kept_table_is_the_draw() -> None:
    with DRAWN.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [row["id"] for row in draw()]
    assert [row["hash"] for row in rows] == sorted(hash_of(row)[:12] for row in rows)
    assert len(rows) == NUMBER


def test_every_reason_leaves_out_a_bug_that_is_there() -> None:
    assert set(BUGS_LEFT_OUT) <= {row["id"] for row in kept()}
    assert set(THEMES_LEFT_OUT) <= {row["theme"] for row in kept()}
    assert sum(not why_left_out(row) for row in kept()) > 3 * NUMBER


@pytest.mark.slow  # the libraries of the loops take seconds to import
def test_every_drawn_bug_is_in_a_loop() -> None:
    for library in ("accelerate", "lightning", "timm", "transformers"):
        pytest.importorskip(library, reason=f"needs {library}: pip install '.[loops]'")
    from watch.bugs.every import BUGS

    assert [bug.id for bug in BUGS] == [row["id"] for row in draw()]
    assert len({bug.loop.name for bug in BUGS}) >= 5
    assert all(bug.what and bug.fair and bug.link for bug in BUGS)
