"""The memory of an examination: foretold before training, refused where there is too little, and recorded."""

import json
import subprocess
import sys

import psutil
import pytest
import torch
from support.entrants import AT_START, PLAN, turn
from support.plans import replan
from support.tasks import make_task

from mpcompare.entrant import foretold
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.foretold import Sizes, available
from mpcompare.entrant.setup import set_up
from mpcompare.errors import InputError
from mpcompare.race.orders import Train
from mpcompare.records import Recorder
from mpcompare.shared import ALONE

EXAMINED = replan(PLAN, verdict={"enabled": True})


def test_sizes_are_those_of_the_network_and_its_optimizer():
    plan = replan(PLAN, task=make_task(in_features=784, hidden=[64], out_features=10, momentum=0.9, batch_size=32))
    setup = set_up(plan, ALONE)
    sizes = Sizes.of(setup)
    weights = 4 * (784 * 64 + 64 + 64 * 10 + 10)
    assert (sizes.params, sizes.moments, sizes.layer) == (weights, weights, 4 * (784 * 64 + 64))
    assert sizes.outputs >= 4 * 32 * (64 + 10)
    assert (sizes.narrow, sizes.aged, sizes.clipped) == (False, False, False)


def test_a_machine_with_too_little_memory_is_one_line_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(foretold, "available", lambda: int(50e6))
    entrant = compete(EXAMINED, Recorder(tmp_path, AT_START))
    turn(entrant, None)
    needed = r"verdict.enabled=true: the examination needs 0\.1 GB of memory, and 0\.1 GB are available: .*=false"
    with pytest.raises(InputError, match=needed):
        turn(entrant, Train())
    assert not (tmp_path / "steps.csv").exists()


def test_a_run_that_is_not_examined_needs_no_memory_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(foretold, "available", lambda: 0)
    entrant = compete(PLAN, Recorder(tmp_path, AT_START))
    turn(entrant, None)
    turn(entrant, Train())
    assert json.loads((tmp_path / "result.json").read_text())["examine_foretold_bytes"] is None


@pytest.mark.parametrize(("limit", "there"), [("3000000\n", 2000000), ("max\n", None), ("500000\n", 0)])
def test_the_memory_of_a_control_group_is_all_that_there_is(tmp_path, monkeypatch, limit, there):
    (tmp_path / "max").write_text(limit)
    (tmp_path / "current").write_text("1000000\n")
    monkeypatch.setattr(foretold, "CGROUPS", [(str(tmp_path / "max"), str(tmp_path / "current"))])
    if there is None:
        assert available() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    else:
        assert available() == there


def test_looking_at_the_outputs_of_a_network_leaves_it_as_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    x = torch.randn(64, 8)
    before, state = {name: b.clone() for name, b in model.named_buffers()}, torch.get_rng_state()
    assert foretold._outputs(model, x) == 3 * 4 * 64 * 8
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)


MLP = ["task.model.hidden=[4000,4000]", "task.batch_size=64"]
GPT = ["task=char_gpt", "task.model.width=512", "task.model.blocks=6", "task.batch_size=4", "optimizer=adamw"]


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize("words", [MLP, GPT], ids=["mlp", "gpt"])
def test_what_an_examination_takes_was_foretold(words, tmp_path):
    words = [*words, "train.steps=3", "train.warmup_steps=1", "measure.budget_s=1", "inference.enabled=false"]
    command = [sys.executable, "-m", "mpcompare", "-m", "backend=amp,fp32", *words, "hydra.sweep.dir=sweep"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("sweep/*/result.json"))]
    assert [result["status"] for result in results] == ["ok", "ok"]
    for result in results:
        assert result["examine_foretold_bytes"] == pytest.approx(result["examine_peak_bytes"], rel=0.2)
