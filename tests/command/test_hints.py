"""Messages on a key, a group or an option that is misspelt, and on one that must be given; and when they come."""

import sys
from types import SimpleNamespace

import pytest
from support.marks import slow_after

from mpcompare.command.faults import known_fault

KEYS = {
    "data=function": "data._target_: expected what to import, as in data._target_=my_package.load, its ",
    "+experment=seed": "+experment=seed: there is no such group (did you mean +experiment?)",
    "train.step=3": "Could not override 'train.step': did you mean train.steps?",
    "task.model.hiden=[3]": "Could not override 'task.model.hiden': did you mean task.model.hidden?",
    "backend.softmx=fp16": "Could not override 'backend.softmx': did you mean backend.softmax?",
    "bakend=amp": "Could not override 'bakend': did you mean backend?",
    "optimizr=adam": "Could not override 'optimizr': did you mean optimizer?",
    "expriment=seed": "Could not override 'expriment': did you mean +experiment?",
    "batch_size=3": "Could not override 'batch_size': did you mean task.batch_size or inference.batch_size?",
    "optimizer.lr=3": "Could not override 'optimizer.lr': did you mean task.optimizer.lr?",
    "qqqq=1": "Could not override 'qqqq'. To append to your config use +qqqq=1",
    "task=module": "task.model._target_: expected what to import, as in task.model._target_=my_package.Net, its ",
}


@pytest.mark.parametrize("override", slow_after(3, KEYS))
def test_a_key_is_one_line_with_what_is_like_it(cli, override):
    ended = cli(override)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(f"mpcompare: error: {KEYS[override]}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "backend=amp,", "fp32"], "backend=amp,: expected no blank before or after a comma"),
        (["-m", "backend=amp", ",fp32"], ",fp32: expected no blank before or after a comma"),
        (["--backend", "amp"], "--backend: write backend=amp"),
        (["--task.batch_size=32"], "--task.batch_size=32: write task.batch_size=32"),
    ],
)
def test_a_blank_next_to_a_comma_and_dashes_before_a_key_are_one_line(cli, words, said):
    assert (cli(*words).code, cli(*words).err) == (2, f"mpcompare: error: {said}\n")


def test_the_section_of_a_key_is_not_like_it(cli):
    ended = cli("task=module", "task.model._target_=my_package.Net", "task.model.width=16")
    expected = "Could not override 'task.model.width'. To append to your config use +task.model.width=16"
    assert (ended.code, ended.err) == (2, f"mpcompare: error: {expected}\n")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("backend=ampp", "(did you mean amp?)"),
        ("backend=mistake/sums_the_los", "(did you mean mistake/sums_the_loss?)"),
        ("+experiment=frist_look", "(did you mean first_look?)"),
        ("precision=bf61", "(did you mean bf16?)"),
        pytest.param("precision=BF16", "(did you mean bf16?)", marks=pytest.mark.slow),
    ],
)
def test_an_option_is_one_line_with_what_is_like_it(cli, override, hint):
    ended = cli(override)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(f"mpcompare: error: {override.lstrip('+')}: expected one of ")
    assert line.endswith(hint)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["precision=fp17"],
        ["-m", "precision=fp16,fp17"],
        ["task=module"],
        ["-m", "backend=amp,fp32", "train.steps=0,-3"],
    ],
)
def test_it_is_refused_before_torch_is_imported(cli, monkeypatch, tmp_path, words):
    for name in ("mpcompare.entrant.plan", "mpcompare.entrant.entrant", "mpcompare.command.clean", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it would raise
    ended = cli(*words)
    assert ended.code == 2
    assert f"mpcompare: error: {words[-1].split('=')[0]}" in ended.err.replace("task.model._target_", "task")
    assert not list(tmp_path.rglob("result.json"))


def test_a_key_of_ones_own_can_be_added(cli):
    ended = cli("+width=3", "task.model.hidden=[${width}]", "--cfg", "job", "-p", "task.model", "--resolve")
    assert ended.code == 0, ended.err
    assert "- 3" in ended.out


@pytest.mark.slow
def test_a_group_of_ones_own_may_be_named_nearly_as_one_of_ours(cli, tmp_path):
    (tmp_path / "conf" / "experiments").mkdir(parents=True)
    (tmp_path / "conf" / "experiments" / "mine.yaml").write_text("a: 1\n")
    ended = cli("--config-dir", str(tmp_path / "conf"), "+experiments=mine", "precision=fp17")
    assert "error: precision=fp17: " in ended.err


def test_a_file_that_hides_a_module_is_named_and_a_linked_environment_is_none(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (here := tmp_path / "here").mkdir()
    (here / "env").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(here)
    failed = ImportError("libgomp.so.1: no such file")
    monkeypatch.setitem(sys.modules, "jinja2", SimpleNamespace(__file__=str(here / "env" / "jinja2.py")))
    assert known_fault(failed) is None
    monkeypatch.setitem(sys.modules, "jinja2", SimpleNamespace(__file__=str(here / "jinja2.py")))
    assert known_fault(failed).startswith(f"jinja2.py in {here} hides a module of that name: rename it (ImportError: ")
