"""The tables of real bugs have all entrants, and the verdict has not become worse since the tables were kept."""

import pytest
import real_bug_tables
from planted.real import table
from planted.real.fourth_draw_settings import LSTM
from planted.real.judged import judged
from planted.real.registry import CORRECT, LATER_DRAWS, THEMES, later_draw, real_bugs
from support.marks import BF16_LSTM

TABLES = sorted({path.stem for path in table.file_of("first").parent.glob("*.csv")} - {"reasons"})
ROWS = {name: {row["id"]: row for row in table.read(name)} for name in TABLES}
BUGS = real_bugs(*THEMES, CORRECT)
DRAWS = {"first": BUGS, **{name: later_draw(name) for name in LATER_DRAWS}}
ALL = [bug for bugs in DRAWS.values() for bug in bugs]
QUICK = ("Lightning#101",)


CLOSE = 1.5  # times a limit: a nearer value may be on the other side of the limit on another CPU


def flagged(bug):
    """Returns whether a kept table says that the verdict flags a bug."""
    rows = [rows[bug.id] for rows in ROWS.values() if bug.id in rows]
    return any(row["flagged"] == "yes" and float(row["worst"]) > CLOSE for row in rows)


def test_there_are_many_and_each_has_a_name_of_its_own():
    ids = [bug.id for bug in ALL]
    assert len(set(ids)) == len(ids)
    assert sum(not bug.correct for bug in BUGS) >= 50
    assert all(sum(not bug.correct for bug in draw) >= 15 for draw in DRAWS.values())
    assert all(bug.what and bug.link.startswith("https://") for bug in ALL)


@pytest.mark.parametrize("draw", DRAWS)
def test_the_table_of_a_draw_is_of_its_entrants(draw):
    assert list(ROWS[draw]) == [bug.id for bug in DRAWS[draw]]
    for bug in DRAWS[draw]:
        row = ROWS[draw][bug.id]
        here = (bug.link, bug.theme, bug.setting.name, bug.precision, bug.what, ", ".join(bug.fair), bug.read)
        assert tuple(row[field] for field in ("link", "theme", "setting", "precision", "what", "fair", "read")) == here
        assert row["named"] == ("yes" if row["flagged"] == "yes" and row["cause"] in bug.fair else "no")


def test_there_is_a_reason_for_each_that_is_missed_or_has_another_name_and_for_no_other():
    told = {(row["table"], row["id"]) for row in table.read("reasons")}
    expected = set()
    for name, rows in ROWS.items():
        for row in rows.values():
            right, draw = row["theme"] == CORRECT, name.removesuffix("_mended")
            changed = any(row[field] != ROWS[draw][row["id"]][field] for field in real_bug_tables.OUTCOME)
            if changed if name != draw else row["flagged" if right else "named"] == ("yes" if right else "no"):
                expected.add((name, row["id"]))
    assert told == expected


def test_the_pages_show_each_draw():
    assert list(real_bug_tables.DRAWS.values()) == list(DRAWS)
    folder = table.file_of("first").parent
    for name, of in (("real_bugs.md", ("themes", "unnamed")), ("real_bugs_tables.md", ("bugs",))):
        page = (folder.parent / name).read_text()
        assert all(f"<!-- numbers: {each} real_bugs/{draw}.csv -->" in page for each in of for draw in DRAWS)


def _param(bug):
    slow = [] if bug.id in QUICK else [pytest.mark.slow]
    return pytest.param(bug, id=bug.id, marks=[*slow, BF16_LSTM] if bug.setting is LSTM else slow)


@pytest.mark.parametrize("bug", [_param(bug) for bug in ALL])
def test_what_was_flagged_is_flagged_and_what_is_right_is_not(bug):
    verdict = judged(bug)
    if flagged(bug) and not bug.correct:
        assert verdict.word == "differs"
    if bug.correct and not flagged(bug):
        assert verdict.word == "same", verdict.because
