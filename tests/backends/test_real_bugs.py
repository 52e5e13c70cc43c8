"""The bugs of conf/backend/real are chosen by name, and each is an entrant of tests/planted/real, too."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from planted.real.registry import THEMES, real_bugs
from support.tasks import make_batch, make_task

from mpcompare.backends import real_bugs as module
from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.contract import Stepper
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.paths import CONF
from mpcompare.tasks.optimizers import AdamW
from mpcompare.tasks.schedules import Cosine

NAMES = sorted(path.stem for path in (CONF / "backend" / "real").glob("*.yaml"))
BASES = {"Amp", "MasterWeights", "OwnAdamW", "OwnRule", "OwnScheduler"}


@cache
def chosen(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"backend=real/{name}"]).backend


def test_each_can_be_chosen_and_is_planted():
    classes = {
        each.__name__
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, (Amp, MasterWeights))
    }
    assert {get_class(chosen(name)._target_).__name__ for name in NAMES} == classes - BASES
    planted = {bug.backend.__name__: bug for bug in real_bugs(*THEMES)}
    for name in NAMES:
        bug = planted[get_class(chosen(name)._target_).__name__]
        text = (CONF / "backend" / "real" / f"{name}.yaml").read_text()
        assert bug.id in text


def test_the_experiment_sweeps_them_with_torch_amp():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", ["+experiment=real_bugs"], return_hydra_config=True)
    first, *others = cfg.hydra.sweeper.params.backend.split(",")
    assert first == "amp"
    assert sorted(name.removeprefix("real/") for name in others) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_trains_and_shows_its_dtypes(name):
    task = replace(make_task(), accumulate=4, clip_norm=0.1, optimizer=AdamW(), schedule=Cosine(8))
    x, y = make_batch(task, torch.device("cpu"))
    model = task.new_model(0, torch.device("cpu"))

    def made():
        return get_class(chosen(name)._target_)(model, task, "fp16", DynamicLossScale(1024.0))

    assert made().module_dtypes(x, y)  # a step with one batch, whatever the task accumulates
    backend = made()
    stepper = Stepper(backend, task.new_rates())
    losses = [float(stepper.step(task.micro_batches(x, y))) for _ in range(4)]
    assert losses[0] > 0
    before, after = dict(model.named_parameters()), backend.master_params()
    assert any(not torch.equal(before[name], after[name]) for name in before)
