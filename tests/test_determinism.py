"""The same seed gives the same bits: run after run in one process, and in processes of their own."""

import json

import pandas as pd
import pytest
from conftest import COLUMNS, CUDA, SMALL

# Wide enough that torch and the native operators split the work between threads.
WIDE = (*SMALL, "task.hidden=[256]", "task.batch_size=512", "train.steps=8", "train.deterministic=true")


def losses(folder):
    """As written: every digit that tells one float from the next."""
    return pd.read_csv(folder / "steps.csv", dtype=str)["loss"].tolist()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("backend", "precision"), COLUMNS)
def test_two_runs_give_the_same_bits(cli, tmp_path, backend, precision, device):
    for name in ("a", "b"):
        ended = cli(*WIDE, f"backend={backend}", f"precision={precision}", f"device={device}",
                    f"hydra.run.dir={tmp_path / name}")  # fmt: skip
        assert ended.code == 0, ended.err
        assert json.loads((tmp_path / name / "result.json").read_text())["flags"]["deterministic_algorithms"] is True
    assert len(set(losses(tmp_path / "a"))) == 9  # it trains
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert cli(*WIDE, f"backend={backend}", f"precision={precision}", "seed=1", f"device={device}",
               f"hydra.run.dir={tmp_path / 'c'}").code == 0  # fmt: skip
    assert losses(tmp_path / "c")[0] != losses(tmp_path / "a")[0]


def test_two_processes_of_a_sweep_give_the_same_bits(cli, tmp_path):
    ended = cli("-m", "backend=scratch,scratch,amp,amp", *WIDE, f"hydra.sweep.dir={tmp_path / 's'}")
    assert ended.code == 0, ended.err
    for one, other in (("0-scratch", "1-scratch"), ("2-amp", "3-amp")):
        assert losses(tmp_path / "s" / f"{one}-auto") == losses(tmp_path / "s" / f"{other}-auto")


def test_without_it_the_flag_is_off(cli, tmp_path):
    assert cli(*SMALL, f"hydra.run.dir={tmp_path / 'run'}").code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["flags"]["deterministic_algorithms"] is False


def test_anything_but_true_and_false_is_refused(cli):
    ended = cli(*SMALL, "train.deterministic=maybe")
    assert ended.code == 2
    assert "train.deterministic=maybe: expected true or false" in ended.err
