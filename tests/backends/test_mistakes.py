"""The mistakes of conf/backend/mistake are chosen by name, and differ from torch.amp on a task that shows them."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from support.judging import dataset_of, examined
from support.marks import slow_after
from support.tasks import make_task

from mpcompare.backends import mistakes
from mpcompare.backends.amp import Amp
from mpcompare.backends.scratch import Scratch
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.optimizers import AdamW, Sgd

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "backend" / "mistake").glob("*.yaml"))
SMALL = make_task(in_features=30, hidden=[24], batch_size=64, samples=64 * 14, lr=0.1)
CLIPS = replace(SMALL, clip_norm=0.05)
ACCUMULATES = replace(SMALL, accumulate=4)
ADAMW = replace(SMALL, optimizer=AdamW(weight_decay=0.1))
MOMENTUM = replace(SMALL, optimizer=Sgd(0.1, 0.9))
TASKS = {
    "clips_before_unscale": CLIPS, "clips_each_tensor": CLIPS,
    "sums_the_loss": ACCUMULATES, "unscales_each_micro_batch": ACCUMULATES,
    "moments_in_16_bits": ADAMW, "decays_the_gradient": ADAMW,
    "resumed": MOMENTUM, "resumed_without_scale": MOMENTUM, "resumed_without_moments": MOMENTUM,
    "resumed_from_copies": MOMENTUM,
    "doubles_after_every_step": SMALL, "multiplies_after_backward": SMALL,
}  # fmt: skip
POLICY = DynamicLossScale(2.0**20, growth_interval=5)


@cache
def chosen(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"backend=mistake/{name}"]).backend


def test_every_mistake_can_be_chosen_and_has_a_task_that_shows_it():
    of_the_module = {
        cls.__name__ for cls in vars(mistakes).values() if isinstance(cls, type) and issubclass(cls, Scratch)
    }
    assert {get_class(chosen(name)._target_).__name__ for name in NAMES} == of_the_module - {"Scratch"}
    assert set(NAMES) == set(TASKS)


@pytest.mark.parametrize("experiment", ["clipping", "accumulation", "adamw", "resume", "as_published"])
def test_the_experiments_sweep_them_with_torch_amp(experiment):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"+experiment={experiment}"], return_hydra_config=True)
    backends = cfg.hydra.sweeper.params.backend.split(",")
    assert backends[0] == "amp"
    assert {name.removeprefix("mistake/") for name in backends[1:]} <= {*NAMES, "scratch"}


@pytest.fixture(scope="module")
def references():
    made = {}

    def of(task):
        key = repr(task)
        if key not in made:
            made[key] = examined("amp", Amp, task, dataset_of(task), "fp16", policy=POLICY, steps=13, noise=2)
        return made[key]

    return of


@pytest.mark.parametrize("name", slow_after(2, NAMES))
def test_the_verdict_finds_it(references, name):
    task, cls = TASKS[name], get_class(chosen(name)._target_)
    run = examined("mistake", cls, task, dataset_of(task), "fp16", policy=POLICY, steps=13)
    verdict = judge_run(run, references(task))
    assert verdict.word == ("same" if name == "resumed" else "differs"), verdict.because


@pytest.mark.parametrize(
    ("mistake", "policy", "cause", "because"),
    [
        (mistakes.DoublesAfterEveryStep, DynamicLossScale(256.0), "loss scale", "loss scale 512 in training step 2"),
        # The policy of the next case doubles after every step, too, so that the other half of the mistake is left.
        pytest.param(
            mistakes.DoublesAfterEveryStep,
            DynamicLossScale(256.0, growth_interval=1),
            "skip",
            "does not say that it",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            mistakes.MultipliesAfterBackward,
            DynamicLossScale(256.0),
            "gradient scaled",
            "256 times what it should be",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_verdict_names_what_is_wrong_with_what_was_published(mistake, policy, cause, because):
    def run(name, cls, noise=0):
        return examined(name, cls, SMALL, dataset_of(SMALL), "fp16", policy=policy, steps=13, noise=noise)

    verdict = judge_run(run("mistake", mistake), run("amp", Amp, noise=2))
    assert (verdict.word, verdict.cause) == ("differs", cause)
    assert because in verdict.because
