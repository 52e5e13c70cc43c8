"""Python objects have names in a configuration, and objects that no process can import are carried."""

import functools
import importlib.util
import os
import subprocess
import sys
import threading
import types

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch import nn

from mpcompare import caller
from mpcompare.api.objects import Objects, importable, on_path, plain, written
from mpcompare.errors import InputError
from mpcompare.paths import CONF


@pytest.fixture
def of_a_test(tmp_path, monkeypatch):
    """Returns a class of a module that is imported from a folder that is not on the path, as pytest may import a
    test."""
    path = tmp_path / "test_mine.py"
    path.write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    spec = importlib.util.spec_from_file_location("tests_of_mine.test_mine", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module.Net


@pytest.fixture
def notebook(monkeypatch):
    """Returns a class and a function of ``__main__``."""
    main = types.ModuleType("__main__")
    exec("class Cell:\n    width = 3\ndef half(x): return x / 2\n", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def test_what_can_be_imported_keeps_its_name(notebook, of_a_test):
    objects = Objects()
    assert objects.call(nn.Linear, "model") == {"_target_": "torch.nn.modules.linear.Linear"}
    assert objects.function(nn.functional.mse_loss, "loss") == {
        "_target_": "torch.nn.functional.mse_loss", "_partial_": True,
    }  # fmt: skip
    assert objects.name(len, "x") == "builtins.len"
    assert objects.carried == {}
    assert not importable(notebook.Cell)
    assert not importable(of_a_test)
    assert not on_path("no_such_package.module")


def test_what_cannot_be_imported_has_a_name_of_its_own(notebook, of_a_test):
    objects, other = Objects(), type("Cell", (), {"__module__": "__main__"})
    names = [objects.name(thing, "model") for thing in (notebook.Cell, other, notebook.Cell, lambda: 0, of_a_test)]
    assert names == [f"mpcompare.caller.{name}" for name in ("Cell", "Cell_2", "Cell", "model", "Net")]
    assert list(objects.carried) == ["Cell", "Cell_2", "model", "Net"]


def test_the_arguments_of_a_partial_are_shown_where_they_are_plain(notebook):
    objects = Objects()
    made = objects.call(functools.partial(nn.Linear, 3, out_features=4), "model")
    assert made == {"_target_": "torch.nn.modules.linear.Linear", "_args_": [3], "out_features": 4}
    hidden = objects.call(functools.partial(notebook.half, nn.Linear), "loss")
    assert hidden == {"_target_": "mpcompare.caller.half"}
    assert objects.function(nn.MSELoss(), "loss") == {
        "_target_": "hydra.utils.get_object", "path": "mpcompare.caller.MSELoss",
    }  # fmt: skip


@pytest.mark.slow
def test_another_process_finds_what_is_carried(notebook, of_a_test, tmp_path):
    objects, path = Objects(), tmp_path / "objects.pkl"
    for thing in (notebook.Cell, notebook.half, of_a_test, functools.partial(notebook.half, nn.Linear)):
        objects.call(thing, "model")
    with objects.by_value():
        caller.save(objects.carried, path)
    code = "from mpcompare.caller import Cell, half, Net; print(Cell.width, half(3), Net(2, 3).weight.shape)"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, caller.FILE: str(path)}, capture_output=True, text=True,
        cwd=CONF.parent,
    )  # fmt: skip
    assert ended.stdout == "3 1.5 torch.Size([3, 2])\n", ended.stderr


def test_a_name_that_nobody_carried_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv(caller.FILE, raising=False)
    with pytest.raises(InputError, match="mpcompare.caller=Net: is known only to the program that called"):
        _ = caller.Net
    assert not hasattr(caller, "Net")  # pickle asks all modules for the names that it saves
    caller.save({"Other": 3}, tmp_path / "objects.pkl")
    monkeypatch.setenv(caller.FILE, str(tmp_path / "objects.pkl"))
    with pytest.raises(AttributeError, match="holds Other, and no Net"):
        _ = caller.Net
    assert not hasattr(caller, "__wrapped__")


@pytest.mark.parametrize(
    "value",
    [3, -2.5e-7, True, False, None, "adamw", "", "a b", "it's", "C:\\", "\\'", "a\\\n", "a,b=${c}", "Ünï",
     [1, [2, "x"]], {"_target_": "a.b", "n": [1, 2], "s": "it's"}, float("inf")],
)  # fmt: skip
def test_values_are_written_as_hydra_reads_them(value):
    (override,) = OverridesParser.create().parse_overrides([f"key={written('key', value)}"])

    def read(parsed):
        if isinstance(parsed, dict):
            return {key: read(item) for key, item in parsed.items()}
        return [read(item) for item in parsed] if isinstance(parsed, list) else getattr(parsed, "text", parsed)

    assert read(override._value) == value


def test_other_values_are_refused():
    assert not plain(threading)
    with pytest.raises(InputError, match="train.steps=object .*: expected a number, a text, a bool, None, or a list"):
        written("train.steps", object())
