"""``python -m mpcompare.pitfalls``: names, the table, the figure, and one line about what a user got wrong."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from support.pitfalls import lines

from mpcompare.pitfalls import __main__ as command
from mpcompare.pitfalls.__main__ import show
from mpcompare.pitfalls.pitfall import Line, Pitfall, number
from mpcompare.pitfalls.registry import PITFALLS


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["pitfalls", *arguments])
    command.main()


@pytest.mark.parametrize("name", PITFALLS)
def test_each_pitfall_is_complete(name):
    pitfall = PITFALLS[name]
    assert pitfall.name == name
    assert pitfall.question.endswith("?")
    assert pitfall.instead.endswith(".")
    assert pitfall.source
    for line in lines(name):
        assert list(line.results) == ["fp16", "bf16", "fp32"]
        assert line.why.endswith(".")
        assert len({each.asked for each in lines(name)}) == len(lines(name))


@pytest.mark.parametrize("name", PITFALLS)
def test_a_terminal_of_80_columns_shows_every_result_in_full(name):
    output, computed = io.StringIO(), replace(PITFALLS[name], lines=lambda: list(lines(name)))
    show(Console(file=output, width=80, force_terminal=True, color_system=None), [computed])
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = text.splitlines()
    for line in lines(name):
        values = [number(value) for value in line.results.values()]
        row = next(row for row in rows if row.split()[-3:] == values)
        assert row.strip().startswith(line.asked.split()[0])
    assert " ".join(PITFALLS[name].instead.split()) in " ".join(text.split())


def test_markup_in_a_pitfall_is_shown_as_text():
    line = Line("[red]x[/red]", {"fp16": 1.0, "bf16": 1.0, "fp32": 1.0}, "[/b] why.")
    output = io.StringIO()
    show(Console(file=output, width=80), [Pitfall("[b]", "Is it?", lambda: [line], "[i]", "[u]")])
    assert all(text in output.getvalue() for text in ("[red]x[/red]", "[/b] why.", "[b]:", "[i]", "[u]"))


def test_numbers_are_short_and_whole_numbers_complete():
    values = (0.0, 65504.0, 16777217.0, 2.0**-24, 1 + 2.0**-10, float("inf"), float("nan"), 3.4e38, -0.9)
    shown = ["0", "65504", "16777217", "5.96046e-08", "1.00098", "inf", "nan", "3.4e+38", "-0.9"]
    assert [number(value) for value in values] == shown


def test_list_names_all_and_computes_nothing(monkeypatch, capsys):
    run(monkeypatch, "--list")
    output = capsys.readouterr().out
    assert [row.split()[0] for row in output.splitlines()] == list(PITFALLS)


def test_names_choose_and_repeat_nothing(monkeypatch, capsys):
    run(monkeypatch, "sums", "norm", "sums")
    output = capsys.readouterr().out
    assert output.count("sums: Is 10,000 times 0.1 a thousand?") == 1
    assert output.index("sums:") < output.index("norm:")
    assert "softmax:" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sum"], f"pitfall=sum: expected one of {', '.join(PITFALLS)} (did you mean sums?)"),
        (["norm", "--out", "formats"], "--out=formats: expected a name that ends in one of .png, .svg, .pdf"),
        (
            ["norm", "--out", "not/there/f.png"],
            "--out=not/there/f.png: cannot write there (there is no folder not/there)",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"mpcompare: error: {message}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("out", "start"), [("f.png", b"\x89PNG"), ("f.svg", b"<?xml"), ("f.pdf", b"%PDF")])
def test_the_figure_is_written(monkeypatch, capsys, tmp_path, out, start):
    run(monkeypatch, "norm", "--out", str(tmp_path / out))
    assert (tmp_path / out).read_bytes().startswith(start)
    assert capsys.readouterr().out.endswith(f"wrote {tmp_path / out}\n")


def test_the_figure_has_a_name_unless_one_is_given_and_is_not_drawn_unasked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "norm")
    assert list(tmp_path.iterdir()) == []
    run(monkeypatch, "norm", "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["pitfalls.png"]
