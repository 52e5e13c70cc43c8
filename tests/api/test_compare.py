"""``mpcompare.compare``: the records of the command line, as objects, and its errors as exceptions."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import mpcompare
from mpcompare import caller
from mpcompare.api.compare import _save
from mpcompare.api.objects import Objects
from mpcompare.backends.amp import Amp
from mpcompare.errors import InputError
from mpcompare.paths import CONF

PAGE = CONF.parent / "docs" / "from_python.md"
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]  # the first block
SMALL = {
    "device": "cpu",
    "train": {"steps": 4, "warmup_steps": 1},
    "measure": {"budget_s": 0.2, "block_s": 0.01},
    "inference": {"enabled": False},
}


class Doubles(Amp):
    """Its gradients are twice as large as they should be."""

    def unscale(self) -> None:
        super().unscale()
        for p in self.model.parameters():
            p.grad.mul_(2)


def in_memory():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 12, generator=generator)
    return x[:256], x[:256, :3].argmax(dim=1), x[256:], x[256:, :3].argmax(dim=1)


@pytest.mark.slow
def test_classes_and_data_in_memory_take_part(tmp_path):
    folder = tmp_path / "it's"  # a name that the command line must quote
    result = mpcompare.compare(
        model=lambda: nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1), data=in_memory(), backends=["amp", Doubles], precision=["bf16"],
        folder=folder, task={"batch_size": 32}, **SMALL,
    )  # fmt: skip
    assert result.folder == folder
    assert list(result.table.index) == ["amp bf16", "Doubles bf16"]
    assert list(result.table["verdict"]) == ["reference", "differs"]
    assert str(result.verdicts["Doubles bf16"]) == "differs: gradient scaled"
    assert result.errors == {}
    assert {"loss", "step_time"} <= set(result.figures)
    assert "**Differs: gradient scaled**: `Doubles bf16`" in repr(result)
    html = result._repr_html_()
    assert html.count("<tr>") == 3
    assert "<li><b>Doubles bf16</b> differs: gradient scaled: every gradient is 2" in html

    record = json.loads((folder / "1-Doubles-bf16" / "result.json").read_text())
    assert record["backend"] == "Doubles"
    assert record["config"]["backend"]["_target_"].endswith(".Doubles")  # pytest's way of importing decides
    assert record["config"]["task"]["model"] == {"_target_": "mpcompare.caller.model"}
    assert record["config"]["task"]["loss"]["path"] == "mpcompare.caller.CrossEntropyLoss"
    assert (record["dataset"], record["timing"]["race"] is not None) == ("in_memory", True)
    assert (folder / "report" / "index.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": lambda: nn.Linear(2, 3), "task": "mnist_cnn"}, "task=mnist_cnn: expected either a task, or a model"),
        ({"loss": 3}, "loss=3: expected one of cross_entropy, masked_cross_entropy, mse, model, or a function"),
        ({"data": 3}, "data=int: expected a DataLoader, a Dataset, tensors or arrays (x, y), the name"),
        (
            {"model": nn.Linear(4, 3), "data": (torch.ones(60, 4), torch.ones(59, 3))},
            "data=59 and 60 samples: expected as many inputs as targets",
        ),
        ({"backends": ["amp", "amp"]}, "backends=amp: is there twice"),
        ({"backends": ["amp", 3]}, "backends=3: expected the name of a backend, its class, or a function"),
        ({"train": {"steps": object}}, "train.steps=type <class 'object'>: expected a number, a text"),
        ({"train": {}}, "train={}: expected one of its values to be set"),
        ({"loss": functools.partial(max, threading.Lock())}, "max=function: cannot be carried into the processes"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said_before_anything_starts(arguments, message, tmp_path):
    with pytest.raises(InputError) as refused:
        mpcompare.compare(folder=tmp_path / "runs", **arguments)
    assert str(refused.value).startswith(message)
    assert not (tmp_path / "runs").exists()


def test_what_is_carried_is_pickled_once(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(caller, "save", lambda objects, path: saved.append(list(objects)))
    objects = Objects()
    objects.carried = {"Net": Doubles, "data": in_memory}
    _save(objects, tmp_path / "objects.pkl")
    assert saved == [["Net", "data"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backends": "nobody"}, "backends=nobody: expected one of accelerate, amp, "),
        ({"train": {"stepz": 3}}, "train.stepz=3: expected one of steps, warmup_steps"),
        pytest.param(
            {"backends": "fp32", "train": {"steps": 0}}, "train.steps=0: expected a whole number",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_what_the_command_refuses_is_an_exception_with_its_line(arguments, message, tmp_path):
    with pytest.raises(InputError) as refused:
        mpcompare.compare(folder=tmp_path / "runs", **arguments)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.slow
def test_a_run_that_fails_among_others_is_a_row(tmp_path):
    result = mpcompare.compare(backends=["fp32", "scratch"], task="mnist_cnn", data="digits", folder=tmp_path / "runs",
                               **{**SMALL, "task.batch_size": 32, "task.samples": 320})  # fmt: skip
    assert list(result.table["status"]) == ["ok", "failed"]
    (error,) = result.errors.values()
    assert error.startswith("backend=scratch trains MLPs")
    assert "failed: backend=scratch trains MLPs" in result._repr_html_()


def test_importing_mpcompare_loads_neither_torch_nor_pandas_nor_hydra():
    code = "import sys, mpcompare; print({'torch', 'pandas', 'hydra', 'matplotlib', 'cloudpickle'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONF.parent)
    assert ended.stdout == "set()\n", ended.stderr


@pytest.mark.slow
def test_the_example_of_the_page_runs_from_standard_input(tmp_path):
    """Its classes are in no file at all."""
    ended = subprocess.run(
        [sys.executable, "-"], input=EXAMPLE, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CONF.parent)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    verdicts = [line for line in ended.stdout.splitlines() if line.startswith("- **")]
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("- **")]
    # The rest of a line depends on the roundings of the CPU, on its speed and on what its products hold for themselves.
    cut = r"5\d+e\+04| gradient of 0\.|(?<=Faster\?)|(?<=Smaller\?)"
    said, page = ([re.split(cut, line)[0] for line in lines] for lines in (verdicts, shown))
    assert said == page


@pytest.mark.slow
def test_the_example_of_the_page_runs_in_a_notebook(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(CONF.parent))
    call = EXAMPLE.index("result = ")
    cells = [EXAMPLE[:call] + "torch.randn(300, 300) @ torch.randn(300, 300)", EXAMPLE[call:], "result",
             "%matplotlib inline\nresult.figures['loss']"]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.get("data", {}) for cell in notebook.cells[2:] for output in cell.outputs]
    assert "<b>ForgetsToUnscale bf16</b> differs: gradient scaled" in shown[0]["text/html"]
    assert "image/png" in shown[1]
    lines = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert "\x1b" not in lines  # lines and no bars, though a kernel asks for colours


@pytest.mark.slow
def test_ctrl_c_ends_the_race(tmp_path):
    code = "import mpcompare; mpcompare.compare(backends=['amp', 'fp32'], data='digits', device='cpu', folder='runs')"
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(CONF.parent)})  # fmt: skip
    results = [tmp_path / "runs" / name / "result.json" for name in ("0-amp-auto", "1-fp32-auto")]
    deadline = time.monotonic() + 120
    begun = [False]
    while not all(begun) and time.monotonic() < deadline:
        time.sleep(0.1)
        begun = [path.exists() and json.loads(path.read_text())["status"] != "planned" for path in results]
    caller.send_signal(signal.SIGINT)
    _, said = caller.communicate(timeout=60)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert [json.loads(path.read_text())["status"] for path in results] == ["interrupted", "interrupted"]
