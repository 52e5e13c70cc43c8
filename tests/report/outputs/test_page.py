"""The page ``index.html``."""

import json
import math
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from markdown_it import MarkdownIt
from support.prose import too_long
from support.records import write_run

from mpcompare.paths import DIFFERS
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.dtypes import ROLES
from mpcompare.report.figures.dtypes import PALE
from mpcompare.report.figures.dtypes import dtypes as drawn_dtypes
from mpcompare.report.outputs.page import output, tables
from mpcompare.report.outputs.page.checks import HIGHEST, LOWEST, SHOWN, Bar, CheckedRun, Kind, bars
from mpcompare.report.outputs.page.words import advice, answers, reading
from mpcompare.report.report import report
from mpcompare.report.runs import find_runs
from mpcompare.verdict.judge.check import Check
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = """<script>alert("x")</script>'</style>&amp;`|"""
SECTIONS = [part.split("\n", 1) for part in re.split(r"^### ", DIFFERS.read_text(), flags=re.MULTILINE)[1:]]
VOID = {"meta", "input", "link", "br", "hr", "img"}


class Page(HTMLParser):
    """A page as a parser sees it: its elements with their attributes, its text, and the open elements."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text, self.scripts = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        where = self.scripts if self.open and self.open[-1] in ("script", "style") else self.text
        where.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def check(name="loss over the run", value=0.8, limit=1.0, kind="run", cause="a cause", because="it is so"):
    return Check(name, value, limit, cause, because, kind)


def rendered(folder, checks=(), files=()):
    """Returns the page of the runs in a folder; ``mine`` has these checks, and differs if one fails."""
    comparisons = compare(find_runs([folder]), "amp", ["task"])
    names = {e.run.result.backend: e.run.name for comparison in comparisons for e in comparison.entries if e.ok}
    failed = next((c for c in checks if not c.passed), None)
    verdict = ("differs", failed.cause, failed.because) if failed else ("same", "", "")
    verdicts = {name: Verdict(Word.REFERENCE, reference=names["amp"]) for name in names.values()}
    verdicts[names.get("mine", "")] = Verdict(Word(verdict[0]), *verdict[1:], names["amp"], list(checks), ["the tail"])
    return output.render(Report([each.judged(verdicts) for each in comparisons], "amp"), list(files))


@pytest.fixture
def runs(tmp_path):
    layer = {"kind": "Linear", **dict.fromkeys(ROLES, "bf16")}
    write_run(tmp_path / "0", "mine", losses=(2.0, 1.25, 1.125), step_ms=5.0, module_dtypes={"layer1": layer})
    write_run(tmp_path / "1", "amp", module_dtypes={"layer1": {**layer, "weight": "fp32"}})
    write_run(tmp_path / "2", "gone", status="failed", losses=())
    return tmp_path


@pytest.mark.slow
def test_the_page_shows_the_answer_first_and_is_well_formed(runs):
    page = Page(rendered(runs, [check()], ["summary.csv"]))
    assert not page.open
    places = [page.words.index(text) for text in ("Verdicts", "Table", "Figures", "Checks", "Precision of each layer",
              "How it was measured", "Configurations", "Versions", "Downloads")]  # fmt: skip
    assert "same as amp bf16 in 1 checks" in page.words
    assert places[0] < page.words.index("same as amp bf16 in") < places[1]
    headings = [tag for tag, _ in page.elements if tag in ("h1", "h2", "h3")]
    assert headings[:3] == ["h1", "h2", "h2"]
    assert {"href": "summary.csv"} in page.all("a")


@pytest.mark.slow
def test_ids_are_used_once_and_links_lead_somewhere(runs):
    page = Page(rendered(runs, [check(), check(), check("another")]))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    inside = [link["href"][1:] for link in page.all("a") if link["href"].startswith("#")]
    assert inside
    assert set(inside) <= set(ids)
    assert {"check=0/loss-over-the-run", "check=0/loss-over-the-run-2", "check=0/another"} <= set(ids)
    references = [value[1:] for use in page.all("use") for name, value in use.items() if "href" in name]
    assert set(references) <= set(ids)


def test_the_page_asks_for_nothing_from_elsewhere(runs):
    page = Page(rendered(runs, [check()]))
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "image", "iframe", "object")
        assert not {"src", "srcset"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "xlink:href"):
            assert not re.match(r"(?!http://www.w3.org)\w+:", attributes.get(name, ""))
    assert any(meta.get("content", "").startswith("default-src 'none'") for meta in page.all("meta"))


def test_a_line_on_digits_ends_with_one_full_stop(runs, monkeypatch):
    monkeypatch.setattr("mpcompare.report.digits.lines", lambda _: ["None overflows.", "nothing is known"])
    text = rendered(runs, [check()])
    assert [each in text for each in ("None overflows. <a", "nothing is known. <a")] == [True, True]


@pytest.mark.slow
def test_everything_that_the_script_shows_is_there_without_it(runs):
    text = rendered(runs, [check(because="the loss is too far", value=3.0)])
    page = Page(re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    for fact in ("differs", "a cause, because the loss is too far", "0.50 (0.50-0.50)", "value 3, limit 1", "2.5e-01",
                 "did not finish", "precision=fp16: no", "Loss. Curves", "fp32", "task.optimizer.lr",
                 "2.15.0"):  # fmt: skip
        assert fact in page.words, fact
    assert sum("role" in svg for svg in page.all("svg")) == len(page.all("figure")) > 4
    for svg in page.all("svg"):
        assert "mine bf16" in svg["aria-label"]
    assert all("hidden" in div for div in page.all("div") if div.get("class") == "curves")


@pytest.mark.slow
def test_text_of_users_is_shown_as_text(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", options={"note": HOSTILE}, dataset=HOSTILE, engine=HOSTILE)
    write_run(tmp_path / "2", HOSTILE, status="failed", losses=())
    write_run(tmp_path / "3", f"{HOSTILE}2")
    text = rendered(tmp_path, [check(HOSTILE, 2.0, because=HOSTILE, cause=HOSTILE, kind=HOSTILE)], [HOSTILE])
    page = Page(text)
    assert not page.open
    assert len(page.all("script")) == 2
    assert 'alert("x")' not in "".join(page.scripts[2:]).replace('\\"', "'")
    assert page.words.count('<script>alert("x")</script>') > 10
    assert "\\u003cscript>alert" in text  # in the numbers
    numbers = json.loads(page.scripts[page.scripts.index(page.scripts[1])])
    assert any(HOSTILE in run["label"] for part in numbers for run in part["runs"])
    (shown,) = (text for text in page.text if text.startswith("### "))
    assert "<script" not in MarkdownIt().enable("table").render(shown)


@pytest.mark.parametrize(
    ("value", "limit", "length", "text", "state"),
    [(0.8, 1.0, 58.1, "0.80", "near"), (1.0, 1.0, 60.0, "1", "near"), (0.997, 1, 60.0, "0.997", "near"),
     (0.01, 1.0, 20.0, "0.01", "far"), (0.0, 0, 0.0, "exact", "far"), (1.0, 0, 100.0, "beyond", "failed"),
     (1e-9, 1.0, 0.0, "1e-09", "far"), (1e9, 1.0, 100.0, "1e+09", "failed"), (0.0, 9.0, 0.0, "0", "far"),
     (math.nan, 1.0, 100.0, "NaN", "failed"), (math.inf, 1.0, 100.0, "beyond", "failed"),
     (5.0, math.inf, 0.0, "0", "far")],
)  # fmt: skip
def test_a_bar_is_the_value_over_the_limit_on_a_logarithmic_axis(value, limit, length, text, state):
    (bar,) = bars("run", [check(value=value, limit=limit)])
    assert (bar.length, bar.text, bar.state) == (length, text, state)


def test_of_many_checks_those_that_failed_and_the_nearest_are_drawn():
    many = [check(name=f"gradient {i}", value=i / 1000, limit=1.0) for i in range(1, 200)]
    few = Kind("gradients", bars("run", many[:SHOWN]))
    assert (few.shown, few.left_out) == (list(few.bars), "")
    right = Kind("gradients", bars("run", many))
    assert [bar.check.value for bar in right.shown] == [i / 1000 for i in range(160, 200)]
    assert right.left_out == "159 more are in verdict.json: none nearer to its limit than 0.16"
    wrong = Kind("gradients", bars("run", [*many, *(check(value=2.0, limit=1.0) for _ in range(SHOWN + 3))]))
    assert all(not bar.check.passed for bar in wrong.shown)
    assert len(wrong.shown) == SHOWN
    assert wrong.left_out == "202 more are in verdict.json: 3 that failed, too"


@pytest.mark.usefixtures("undrawn")
def test_nearness_is_said_of_no_run_and_the_first_check_that_failed_decides(runs):
    tight, loose = replace(check(value=0.999), tight=True), check("another", 0.9)
    assert [bar.state for bar in bars("run", [tight, loose])] == ["far", "near"]
    passed = rendered(runs, [tight, loose])
    assert "nearest to its limit" not in Page(passed).words
    for checks, first in (([tight, check("first", 1.5), check("second", 9.0)], "first"), ([tight], None)):
        verdict = Verdict(Word.DIFFERS, "", "", "1", checks)
        failed = CheckedRun(SimpleNamespace(run=SimpleNamespace(name="run"), verdict=verdict)).first_failed
        assert (failed and failed.check.name) == first


def test_the_limit_stands_where_the_axis_is_1():
    assert (LOWEST, HIGHEST) == (-3, 2)  # the style sheet has the line of the limit at 60 %
    assert Bar(check(value=1.0), "").length == 60.0


def test_verdicts_in_words(runs):
    (comparison,) = compare(find_runs([runs]), "amp")

    def words(*verdict, checks=(), unchecked=()):
        judged = Verdict(Word(verdict[0]), *verdict[1:], "1", list(checks), list(unchecked))
        answer = next(each for each in answers(comparison.judged({"0": judged})) if each.label == "mine bf16")
        return f"{answer.label}: {answer.word}{answer.more}"

    assert words("same", "", "", checks=[check()]) == ("mine bf16: same as amp bf16 in 1 checks")
    assert words("differs", "clip", "it is so", checks=[check(value=2.0)]) == (
        "mine bf16: differs from amp bf16: clip, because it is so (1 of 1 checks failed)"
    )
    assert words("differs as declared", "no master weights", "", checks=[check()]) == (
        "mine bf16: differs as declared from amp bf16: no master weights; no other difference was found in 1 checks"
    )
    assert words("not examined", "", "") == "mine bf16: not examined"
    assert words("not comparable", "seed", "seed is different in 1") == (
        "mine bf16: not comparable: seed: seed is different in 1"
    )
    words_alone = [answer.word for answer in answers(comparison)]
    assert words_alone == ["did not finish", "not examined", "not examined"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_answers_stand_first(runs):
    page = Page(rendered(runs, [check(because="the loss is too far", value=3.0)]))
    begin = page.words.index("Right?")
    assert page.words[begin:].startswith(
        "Right? mine bf16 does not compute the same as amp bf16 (a cause): the loss is too far. "
    ), page.words[begin : begin + 200]
    assert begin < page.words.index("Faster?") < page.words.index("Smaller?") < page.words.index("Verdicts")


@pytest.mark.usefixtures("undrawn")
def test_how_to_read_the_page_is_said_with_its_own_numbers(runs):
    words = Page(rendered(runs, [check(value=3.0), check("another")])).words
    assert "a step of mine bf16 takes 0.50 times as long as one of amp bf16" in words
    assert "between 0.50 and 0.50" in words
    assert "mine bf16 needs 1.00 times the peak of amp bf16" in words
    assert "1 of its 2 checks failed" in words
    assert "the median over pairs of blocks that took turns" in words


def test_how_to_read_the_page_says_what_is_so(tmp_path):
    write_run(tmp_path / "0", "amp")
    write_run(tmp_path / "1", "mine", race="another")
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    words = " ".join(reading(comparison.judged({"1": Verdict(Word.NOT_EXAMINED, reference="0")})))
    assert "The two took no turns, so drift of the machine is in it." in words
    assert "pairs of blocks" not in words
    assert "checks failed" not in words


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_differs_says_what_its_cause_means_and_what_to_do(runs):
    page = Page(rendered(runs, [replace(check(value=3.0), cause="clip")]))
    assert "What this means, and what to do" in page.words
    section = next(body for name, body in SECTIONS if name == "clip")
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    assert " ".join(code.split()) in page.words
    assert "Confirm" in page.words
    assert "What this means" not in Page(rendered(runs, [check()])).words


@pytest.mark.parametrize(("cause", "section"), SECTIONS)
def test_the_advice_on_a_cause_is_its_whole_section_and_nothing_else(cause, section):
    page = Page(str(advice(cause)))
    assert page.words.split()[:8] == re.sub(r"```python|```|[*`]", "", section).split()[:8]
    assert len(page.all("pre")) == 1
    assert not page.all("a")  # it would lead nowhere from a page that was sent to somebody
    assert not {"h2", "h3"} & {tag for tag, _ in page.elements}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_no_sentence_of_the_page_and_of_the_markdown_is_too_long(runs):
    long = "the gradient of blocks.0.weight in the first step is 12 times its limit: " + "a reason, " * 5
    text = rendered(runs, [check(value=3.0, because=long), check("another")])
    text, licence, _ = text.partition("Permission is hereby granted")
    assert licence
    page = re.sub(r"<(script|style|svg).*?</\1>", "", text, flags=re.DOTALL)
    page = re.sub(
        r"<br>|</?(p|li|d[dlt]|t[dhr]|h\d|summary|figcaption|div|pre|button|label|nav|ul)\b[^>]*>", "\n\n", page
    )
    assert too_long(re.sub(r"<[^>]*>", "", page)) == []


def test_settings_that_differ_in_late_digits_differ_and_a_ratio_that_is_not_shown_sorts_nothing(tmp_path):
    write_run(tmp_path / "0", "amp", lr=0.1234567)
    write_run(tmp_path / "1", "mine", lr=0.1234568, blocks=[10.0])
    (comparison,) = compare(find_runs([tmp_path]), "amp", ["task"])
    (row,) = (row for row in tables.configurations(comparison).rows if row.name == "task.optimizer.lr")
    assert row.differs
    assert row.values == ["0.1234567", "0.1234568"]
    runs = tables.runs(comparison)
    place = [column.name for column in runs.columns].index("time_vs_baseline")
    assert [row[place] for row in runs.rows] == [tables.Cell("1", 1.0), tables.Cell("-")]


def test_the_load_of_blocks_too_short_to_tell_is_not_known(tmp_path):
    write_run(tmp_path / "0", "amp", other_cores=math.nan)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    shown = {row.name: row.values for row in tables.measured(comparison).rows}
    assert shown["cores that other programs kept busy, most"] == ["not known"]
    assert shown["own cores busy between turns, median"] == ["0"]


def test_the_dtypes_of_a_run_are_compared_with_its_own_baseline(tmp_path):
    for precision in ("fp16", "bf16"):
        layers = {"layer1": {"kind": "Linear", **dict.fromkeys(ROLES, precision)}}
        for backend in ("amp", "mine"):
            write_run(tmp_path / f"{backend}-{precision}", backend, precision, module_dtypes=layers)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    assert [row.differs for row in tables.dtypes(comparison).rows] == [False]
    (axes,) = drawn_dtypes(Report([comparison], "amp")).axes
    assert [patch.get_alpha() for patch in axes.patches] == [1.0] * 10 + [PALE] * 10  # baselines, then the others


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_what_differs_comes_first_and_the_verdict_stands_next_to_the_name(tmp_path):
    for place, backend in enumerate(("amp", "right", "mine")):
        write_run(tmp_path / str(place), backend)
    text = rendered(tmp_path, [check(value=3.0)])
    table = text[text.index('aria-label="Runs"') :]
    headings = re.findall(r'<th scope="col" class="\w+">(.*?)</th>', table)
    assert headings[:3] == ["backend", "precision", "verdict"]
    assert re.findall(r'<tr class="(\w+)">\s*<td[^>]*>(.*?)</td>', table)[0] == ("differs", "mine")
    answers = text[text.index('class="answers"') :]
    assert re.findall(r"<strong>(.*?)</strong>", answers)[0] == "mine bf16"


def test_a_report_in_which_nothing_finished_has_a_page(tmp_path):
    write_run(tmp_path / "0", "mine", status="failed", losses=())
    assert not report([tmp_path], tmp_path / "report", "amp")
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert "precision=fp16: no" in page.words
    assert "summary.csv" in page.words


@pytest.mark.slow
def test_long_training_and_many_runs_stay_small(tmp_path):
    losses = [2.0 + math.sin(step) for step in range(2000)]
    for place in range(30):
        write_run(tmp_path / str(place), "amp" if place == 0 else f"mine{place}", losses=losses)
    text = rendered(tmp_path)
    assert len(text) < 4e6
    (numbers,) = re.findall(r'id="numbers">(.*?)</script>', text)
    (part,) = json.loads(numbers)
    assert part["every"] == 2
    assert len(part["steps"]) == len(part["runs"][0]["loss"]) == 1000


PROBE = """
<script>
const requests = performance.getEntriesByType("resource").length;
const drawn = [...document.querySelectorAll(".uplot canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) colours.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
  }
  return [...colours];
});
const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
const wide = document.documentElement.scrollWidth;
document.body.dataset.probe = JSON.stringify({ requests, drawn, open: target.open, wide, narrow: innerWidth });
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_the_page_without_errors_and_requests(runs):
    policy = r'<meta http-equiv="Content-Security-Policy"[^>]*>'
    text = rendered(runs, [check(), check("another", 2.0)])
    (runs / "index.html").write_text(text)
    (runs / "probe.html").write_text(re.sub(policy, "", text).replace("</body>", PROBE + "</body>"))

    def browse(name):
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                   "--window-size=500,900", "--virtual-time-budget=3000", "--dump-dom",
                   f"--user-data-dir={runs / 'profile'}", f"file://{runs / name}#check=0/another"]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    start = time.perf_counter()
    ended = browse("index.html")
    assert time.perf_counter() - start < 60
    assert "CONSOLE" not in ended.stderr, ended.stderr
    assert ended.stdout.count("<canvas") == 2  # difference and loss: no scale, and no norm was recorded
    ended = browse("probe.html")
    (probe,) = (attributes["data-probe"] for attributes in Page(ended.stdout).all("body"))
    seen = json.loads(probe)
    assert seen["requests"] == 0
    assert seen["open"]
    assert seen["wide"] <= seen["narrow"]
    difference, loss = seen["drawn"]
    assert 0x0072B2 in difference
    assert 0xD55E00 not in difference  # the baseline's
    assert {0x0072B2, 0xD55E00} <= set(loss)
