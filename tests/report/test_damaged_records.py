"""Reports with a damaged record, or with a stranger's record: all other records have their rows."""

import json
import os

import pandas as pd
import pytest
from support.records import MEASURED, write_run

from mpcompare.errors import InputError
from mpcompare.fields import LayerFields
from mpcompare.report.figures.registry import FIGURES
from mpcompare.report.outputs import data, summary_md
from mpcompare.report.report import contents_of, report
from mpcompare.report.runs import UNREADABLE, find_runs

LAYER = {**dict.fromkeys(LayerFields.__annotations__, "bf16"), "kind": "Linear"}
WAY = {"test_accuracy": 0.5, "test_loss": 1.0, "latency_ms": 1.0}
MORE = {
    "module_dtypes": {"layer1": LAYER},
    "dtypes": {"params": "fp32"},
    "inference": {"batch_size": 8, "ways": {"fp32": WAY}},
}
STRANGE = (None, 5, -1, "x", "nan", [1], {"x": {"y": 5}}, 10**30)


@pytest.fixture
def three(tmp_path):
    """Returns the folder of three runs; the second, amp's, is the baseline."""
    for place, backend in enumerate(("mine", "amp", "other")):
        write_run(tmp_path / "runs" / f"{place}-{backend}", backend, sweep="s", **MEASURED, **MORE)
    return tmp_path / "runs"


def places(value, above=()):
    """Yields the path of every value within a JSON value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*above, key)
            yield from places(inner, (*above, key))


def changed(result, path, value):
    """Returns a copy of a result with another value at a path."""
    first, *rest = path
    return {**result, first: changed(result[first], rest, value) if rest else value}


def rows(folder):
    """Returns the status of each run by its backend, as summary.csv has it, from a report that can be drawn."""
    contents = contents_of([folder])
    summary_md.lines(contents)
    return {row["run"]: row["status"] for row in data.summary_rows(contents)}


@pytest.mark.slow
@pytest.mark.parametrize("apart", [8, 4])  # one value for each field, or two
def test_any_field_may_hold_anything_and_two_others_have_their_rows(three, apart):
    file = three / "2-other" / "result.json"
    result = json.loads(file.read_text())
    seen: dict[tuple[str, ...], set[str]] = {}
    refused = []
    for place, path in enumerate(places(result)):
        for value in STRANGE[place % apart :: apart]:
            file.write_text(json.dumps(changed(result, path, value)))
            try:
                status = rows(three)
            except InputError:  # another task, or other data: that is no damage
                refused.append(path)
                continue
            assert {status.pop("0-mine"), status.pop("1-amp")} == {"ok"}, (path, value)
            seen.setdefault(path, set()).update(status.values())
    assert len(seen) > 80
    assert {path[0] for path in refused} <= {"config", "seed", "dataset_fingerprint", "initial_weights"}
    for path in [("dtypes",), ("phase_ms",), ("memory_model",), ("timing", "rounds"), ("config", "train", "steps")]:
        assert UNREADABLE in seen[path]
    assert seen[("format_version",)] == {UNREADABLE}
    assert seen[("config", "data", "_target_")] == {"ok"}  # nobody computes with it


@pytest.mark.parametrize("backend", STRANGE)
def test_what_a_failed_run_asked_for_may_be_anything(three, backend):
    write_run(three / "3-gone", "gone", status="failed", losses=())
    file = three / "3-gone" / "result.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), ("config", "backend"), backend)))
    assert rows(three) == {"0-mine": "ok", "1-amp": "ok", "2-other": "ok", "3-gone": "failed"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (("config", "train", "steps"), "steps.csv does not hold the steps 1 to 10000000000"),
        (("timing", "rounds"), "blocks.csv does not hold the rounds 1 to 10000000000"),
    ],
)
def test_a_count_that_fills_the_memory_is_a_row(three, path, said):
    file = three / "2-other" / "result.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), path, 10**10)))
    errors = {row["run"]: row["error"] for row in data.summary_rows(contents_of([three]))}
    assert errors == {"0-mine": None, "1-amp": None, "2-other": said}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("sum_ms", [0, -1, "nan"])
def test_phases_without_a_time_are_in_doubt(three, sum_ms, capsys):
    file = three / "2-other" / "result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "phase_sum_ms": sum_ms}))
    assert report([three], three.parent / "report", "amp", formats=[])
    assert f"other bf16: the phases of a step take {sum_ms} ms together" in " ".join(capsys.readouterr().out.split())


def test_the_name_of_a_folder_steers_no_terminal(three):
    (three / "2-other").rename(three / "\x1b[2Jother")
    (three / "\x1b[2Jother" / "result.json").unlink()
    (gone,) = [run for run in find_runs([three]) if run.result.status == UNREADABLE]
    assert gone.name == gone.result.backend == "\\x1b[2Jother"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[" * 100_000, "more than 50 deep"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "more than 50 deep"),
        (b"\xff\xfe", "decode"),
        (b'{"format_version": 3, "status": "ok"}', "has no backend"),
        (
            b'{"format_version": 1}',
            "=1: expected 3: another version of mpcompare has written result.json",
        ),
        (b'{"status": "ok"}', "format_version=None: expected 3"),
        (b'{"status": "ok", "backend": "other", "dtypes": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_a_damaged_record_is_a_row_with_its_reason(three, content, said):
    (three / "2-other" / "result.json").write_bytes(content)
    assert rows(three) == {"0-mine": "ok", "1-amp": "ok", "2-other": UNREADABLE}
    errors = {row["run"]: row["error"] for row in data.summary_rows(contents_of([three]))}
    assert said in errors["2-other"]


@pytest.mark.usefixtures("undrawn")
def test_columns_that_are_missing_or_too_many_are_named(three):
    file = three / "2-other" / "blocks.csv"
    file.write_text(file.read_text().replace("seen_s", "seen_h"))
    assert not report([three], three.parent / "report", "amp", formats=[])
    table = pd.read_csv(three.parent / "report" / "summary.csv").set_index("run")
    assert "blocks.csv lacks seen_s and should not have seen_h" in table["error"]["2-other"]
    assert (three.parent / "report" / "index.html").exists()
    assert "other bf16` cannot be read." in (three.parent / "report" / "summary.md").read_text()


def test_a_pipe_in_the_place_of_a_record_is_a_row(three):
    (three / "2-other" / "result.json").unlink()
    os.mkfifo(three / "2-other" / "result.json")
    assert rows(three) == {"0-mine": "ok", "1-amp": "ok", "2-other": UNREADABLE}
    os.mkfifo(three / "0-mine" / "numerics.json")
    assert rows(three) == {"0-mine": UNREADABLE, "1-amp": "ok", "2-other": UNREADABLE}


@pytest.mark.usefixtures("undrawn")
def test_a_run_whose_record_is_missing_is_a_row(three):
    (three / "2-other" / "result.json").unlink()
    assert not report([three], three.parent / "report", "amp", formats=[])
    table = pd.read_csv(three.parent / "report" / "summary.csv").set_index("run")
    assert table["error"]["2-other"] == "result.json is missing"


def test_a_record_of_which_no_other_can_be_read_is_refused(three):
    for file in three.glob("*/result.json"):
        file.write_text("{")
    with pytest.raises(InputError, match="0-mine: not a readable run"):
        contents_of([three])


def test_a_first_record_that_cannot_be_read_does_not_configure_the_report(three):
    file = three / "0-mine" / "result.json"
    file.write_text(file.read_text().replace('"baseline": "amp"', '"baseline": "other", "strict": "perhaps"'))
    assert contents_of([three]).baseline == "amp"


def test_a_judge_that_stops_costs_one_verdict(three, monkeypatch):
    def judge_run(run, reference):
        if run.name == "2-other":
            raise ZeroDivisionError("a bug")
        return judged(run, reference)

    judged = report.__globals__["judge_all"].__globals__["judge_run"]
    monkeypatch.setattr("mpcompare.report.verdicts.judge_run", judge_run)
    verdicts = contents_of([three]).verdicts
    assert {name: verdict.word for name, verdict in verdicts.items()} == dict.fromkeys(verdicts, "not examined")
    assert verdicts["2-other"].because == "the judge stopped with ZeroDivisionError: a bug"
    assert verdicts["0-mine"].because == ""


@pytest.mark.slow
def test_texts_that_steer_a_terminal_or_a_spreadsheet_are_texts(tmp_path, capsys):
    write_run(tmp_path / "0", "\x1b[2Jamp", dataset="=cmd|' /C calc'!A0", device_name="@SUM(1)")
    write_run(tmp_path / "1", "+mine", dataset="=cmd|' /C calc'!A0", device_name="@SUM(1)")
    report([tmp_path], tmp_path / "report", "amp", formats=[])
    assert "\x1b" not in capsys.readouterr().out
    table = (tmp_path / "report" / "summary.csv").read_text()
    assert "\x1b" not in table + (tmp_path / "report" / "index.html").read_text()
    first, second = table.splitlines()[1:]
    assert first.startswith("\\x1b[2Jamp,")
    assert second.startswith("'+mine,")
    for row in (first, second):
        assert ",'=cmd|' /C calc'!A0," in row
        assert ",'@SUM(1)," in row


@pytest.mark.usefixtures("undrawn")
def test_brackets_and_colons_are_no_markup_of_a_console(tmp_path, capsys):
    for place, backend in enumerate(("amp", "mine [one]", "mine [/x]", "mine :x:")):
        write_run(tmp_path / str(place), backend)
    report([tmp_path], tmp_path / "report", "amp", formats=[])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for name in ("mine [one]", "mine [/x]", "mine :x:"):
        assert sum(line.startswith(f"{name} ") for line in lines) >= 2  # runs and phases


@pytest.mark.slow
def test_a_dollar_is_a_dollar_in_every_figure(three):
    for file in three.glob("*/result.json"):
        text = file.read_text().replace("mine", "$a_{mine$").replace('"t"', '"$t^$"').replace("asked for", r"$\nope$")
        file.write_text(text.replace("layer1", r"$\frac$"))
    contents = contents_of([three])
    for name, draw in FIGURES.items():
        if figure := draw(contents):
            figure.draw_without_rendering()
            texts = {text.get_text() for text in figure.findobj(lambda each: hasattr(each, "get_text"))}
            assert not any("cannot be drawn" in text or "mathdefault" in text for text in texts), name
    assert "$a_{mine$ bf16" in {text.get_text() for text in FIGURES["step_time"](contents).axes[0].get_yticklabels()}


def test_a_phase_that_no_step_has_costs_its_own_row(three):
    damaged, *_ = three.glob("*/result.json")
    damaged.write_text(damaged.read_text().replace('"forward"', '"foeward"'))
    rows = [run.result.error for run in find_runs([three])]
    assert sum("phase_ms, a key=foeward: expected one of forward, backward" in row for row in rows) == 1


@pytest.mark.slow
def test_a_figure_that_cannot_be_drawn_is_one_that_says_why(three, monkeypatch, caplog):
    monkeypatch.setattr("mpcompare.report.figures.times.bars", lambda *_, **__: 1 / 0)
    assert report([three], three.parent / "report", "amp")
    assert "the figure step_time cannot be drawn (ZeroDivisionError: division by zero)" in caplog.text
    assert "the figure step_time cannot be drawn" in (three.parent / "report" / "index.html").read_text()
    assert (three.parent / "report" / "step_time.png").stat().st_size > 1000


@pytest.mark.usefixtures("undrawn")
def test_an_output_that_cannot_be_made_costs_no_other(three, monkeypatch, caplog, capsys):
    monkeypatch.setattr("mpcompare.report.outputs.summary_md.lines", lambda _: 1 / 0)
    assert not report([three], three.parent / "report", "amp", formats=[])
    assert "summary_md cannot be made: ZeroDivisionError" in caplog.text
    assert (three.parent / "report" / "summary.csv").exists()
    assert "mine" in capsys.readouterr().out
