"""The second draw of bugs: what is flagged stays flagged, and no right twin has a defect."""

import csv
from pathlib import Path

import pytest
from watch.judging import SLACK, Judged, judged
from watch.second_draw.every import BUGS, table
from watch.second_draw.registry import DEFECT, FACT, Bug

ROOT = Path(__file__).parents[2]
QUICK = ("wekws#72", "Applio#860", "graphstorm#1366")
MENDED = table("mended")

pytestmark = pytest.mark.filterwarnings("ignore")


def judge(bug: Bug, wrong: bool) -> Judged:
    return judged(bug.seeded(wrong), bug.meant, 0, bug.steps, bug.steps + SLACK)


def assert_judged_as_before(bug: Bug) -> None:
    result, twin = judge(bug, wrong=True), judge(bug, wrong=False)
    before = MENDED[bug.thread]
    assert "error" not in (result.verdict, twin.verdict), result.sentences + twin.sentences
    if before["flagged"] == "yes":
        assert result.flagged, result.text
    if before["fair name"] == "yes":
        assert result.causes[0] in bug.fair, result.text
    if before["refused"]:
        assert result.differing
    assert (twin.causes, twin.differing) == ([], []), twin.text


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.id in QUICK], ids=lambda bug: bug.id)
def test_a_defect_is_flagged_and_its_right_twin_is_not(bug: Bug) -> None:
    assert MENDED[bug.thread]["fair name"] == "yes"
    assert_judged_as_before(bug)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_every_bug_is_judged_as_before(bug: Bug) -> None:
    assert_judged_as_before(bug)


def test_the_kept_tables_are_of_these_bugs_and_fair_names() -> None:
    ours = [(bug.thread, bug.what, bug.kind, bug.precision, ", ".join(bug.fair)) for bug in BUGS]
    for name in ("blind", "mended"):
        rows = table(name).values()
        assert [tuple(row[k] for k in ("thread", "what", "kind", "precision", "fair")) for row in rows] == ours
        assert {row["twin"] for row in rows} == {"no defect"}
    assert {bug.kind for bug in BUGS} == {DEFECT, FACT}
    assert len({bug.id for bug in BUGS}) == len(BUGS)


def test_no_thread_is_in_another_table() -> None:
    links = set()
    for file in (ROOT / "docs" / "real_bugs").glob("*.csv"):
        with file.open(newline="") as opened:
            links |= {row.get("link", "").replace("/pull/", "/issues/").lower() for row in csv.DictReader(opened)}
    assert len(links) > 100
    assert not links & {bug.link.lower() for bug in BUGS}
