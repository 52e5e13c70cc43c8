"""The draws whose bugs have right twins: flagged bugs stay flagged, and no more twins have a defect."""

import csv
from pathlib import Path

import pytest
from watch.draws import DRAWS
from watch.fourth_draw.every import CAREFUL
from watch.fourth_draw.registry import Careful
from watch.judging import SLACK, Judged, judged
from watch.second_draw.registry import DEFECT, FACT, Bug, kept, table

ROOT = Path(__file__).parents[2]
QUICK = "SupContrast#142"
KEPT = {draw: table(draw, kept(draw)[-1]) for draw in DRAWS}
BUGS = [(draw, bug) for draw, bugs in DRAWS.items() for bug in bugs]
QUICK_BUGS = [(draw, bug) for draw, bug in BUGS if bug.id == QUICK]

pytestmark = pytest.mark.filterwarnings("ignore")


def name_of(value: object) -> str:
    if isinstance(value, Careful):
        return value.make.__name__
    return value.id if isinstance(value, Bug) else str(value)


def judge(bug: Bug, wrong: bool) -> Judged:
    return judged(bug.seeded(wrong), bug.meant, 0, bug.steps, bug.steps + SLACK)


def assert_judged_as_before(bug: Bug, before: dict[str, str]) -> None:
    result, twin = judge(bug, wrong=True), judge(bug, wrong=False)
    assert "error" not in (result.verdict, twin.verdict), result.sentences + twin.sentences
    if before["flagged"] == "yes":
        assert result.flagged, result.text
    if before["fair name"] == "yes":
        assert result.causes[0] in bug.fair, result.text
    if before["refused"]:
        assert result.differing
    if before["twin"] == "no defect":
        assert not twin.causes, twin.text
    if not before["twin refused"]:
        assert not twin.differing, twin.text


@pytest.mark.parametrize(("draw", "bug"), QUICK_BUGS, ids=name_of)
def test_a_defect_is_flagged_and_its_right_twin_is_not(draw: str, bug: Bug) -> None:
    before = KEPT[draw][bug.thread]
    assert (before["fair name"], before["twin"], before["twin refused"]) == ("yes", "no defect", "")
    assert_judged_as_before(bug, before)


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "bug"), BUGS, ids=name_of)
def test_every_bug_is_judged_as_before(draw: str, bug: Bug) -> None:
    assert_judged_as_before(bug, KEPT[draw][bug.thread])


def test_each_defect_of_the_fourth_draw_has_a_careful_loop() -> None:
    defects = {bug.thread for bug in DRAWS["fourth"] if bug.kind == DEFECT}
    assert {loop.thread for loop in CAREFUL} == defects
    assert len(CAREFUL) == len(defects) == 18


@pytest.mark.slow
@pytest.mark.parametrize("loop", CAREFUL, ids=name_of)
def test_no_careful_loop_is_accused(loop: Careful) -> None:
    result = judged(loop.seeded(), loop.meant)
    assert result.verdict == "no defect", result.text + "".join(result.sentences)
    assert not result.differing


@pytest.mark.parametrize("draw", DRAWS)
def test_the_kept_tables_are_of_these_bugs_and_fair_names(draw: str) -> None:
    bugs = DRAWS[draw]
    ours = [(bug.thread, bug.what, bug.kind, bug.precision, ", ".join(bug.fair)) for bug in bugs]
    for name in kept(draw):
        rows = table(draw, name).values()
        assert [tuple(row[k] for k in ("thread", "what", "kind", "precision", "fair")) for row in rows] == ours
        if name == "mended":
            assert {row["twin"] for row in rows} == {"no defect"}
    assert {bug.kind for bug in bugs} == {DEFECT, FACT}
    assert len({bug.id for bug in bugs}) == len(bugs)


@pytest.mark.parametrize("draw", DRAWS)
def test_no_thread_is_in_another_table(draw: str) -> None:
    links = {bug.link.lower() for other, bug in BUGS if other != draw}
    for file in [*(ROOT / "docs" / "real_bugs").glob("*.csv"), ROOT / "docs" / "watch" / "bugs_blind.csv"]:
        with file.open(newline="") as opened:
            links |= {row.get("link", "").replace("/pull/", "/issues/").lower() for row in csv.DictReader(opened)}
    assert len(links) > 100
    assert not links & {bug.link.lower() for bug in DRAWS[draw]}
