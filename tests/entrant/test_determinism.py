"""The same seed gives the same bits: run after run in one process, and in processes of their own."""

import json

import pandas as pd
import pytest
import torch
from support.backends import CPU_BACKENDS, backends
from support.command import SMALL


@pytest.fixture(autouse=True)
def as_it_was(two_threads):
    yield
    torch.use_deterministic_algorithms(False)


# Wide enough that torch and the native operators split the work between threads.
WIDE = (*SMALL, "task.model.hidden=[256]", "task.batch_size=512", "train.steps=8", "train.deterministic=true",
        "verdict.enabled=false")  # fmt: skip


def losses(folder):
    """Returns the losses as written, with all digits that tell one float from the next."""
    return pd.read_csv(folder / "steps.csv", dtype=str)["loss"].tolist()


@backends([b for b in CPU_BACKENDS if b[0] != "amp_graph"], quick=())  # amp_graph is amp's arithmetic there
def test_two_runs_give_the_same_bits(cli, tmp_path, name, precision, device):
    backend = (f"backend={name}", f"precision={precision}", f"device={device.type}")
    for run in ("a", "b"):
        ended = cli(*WIDE, *backend, f"hydra.run.dir={tmp_path / run}")
        assert ended.code == 0, ended.err
        assert json.loads((tmp_path / run / "result.json").read_text())["flags"]["deterministic_algorithms"] is True
    assert len(set(losses(tmp_path / "a"))) == 9  # the loss changes in each step
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert cli(*WIDE, *backend, "seed=1", f"hydra.run.dir={tmp_path / 'c'}").code == 0
    assert losses(tmp_path / "c")[0] != losses(tmp_path / "a")[0]


@pytest.mark.slow
def test_two_processes_of_a_sweep_give_the_same_bits(cli, tmp_path):
    ended = cli("-m", "backend=scratch,scratch,amp,amp", *WIDE, f"hydra.sweep.dir={tmp_path / 's'}")
    assert ended.code == 0, ended.err
    for one, other in (("0-scratch", "1-scratch"), ("2-amp", "3-amp")):
        assert losses(tmp_path / "s" / f"{one}-auto") == losses(tmp_path / "s" / f"{other}-auto")


@pytest.mark.slow
def test_without_it_the_flag_is_off(cli, tmp_path):
    assert cli(*SMALL, f"hydra.run.dir={tmp_path / 'run'}").code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["flags"]["deterministic_algorithms"] is False


@pytest.mark.slow
def test_anything_but_true_and_false_is_refused(cli):
    ended = cli(*SMALL, "train.deterministic=maybe")
    assert ended.code == 2
    assert "train.deterministic=maybe: expected true or false" in ended.err
