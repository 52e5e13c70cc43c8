"""Each row of other people's mixed precision: it trains, and the verdict on it is what was seen here.

The rows of libraries are skipped where the library is not installed; the reason names the extra.
"""

import importlib
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.judging import dataset_of, examined
from support.marks import slow_after
from support.products import shows_its_products
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.backends.peers import library
from mpcompare.backends.peers.amp_fused import AmpFused
from mpcompare.contract import BackendUnavailable, promises_of
from mpcompare.errors import InputError
from mpcompare.loss_scale import NoLossScale, StaticLossScale
from mpcompare.promises import NOTHING, Promises
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.optimizers import AdamW
from mpcompare.testing import check_backend, small_tasks

CPU = torch.device("cpu")
LIBRARIES = ("fabric.FabricRow", "accelerate.AccelerateRow", "keras.KerasRow", "kahan.Kahan", "jax.JaxRow")
MOMENTUM = make_task(samples=32 * 12, momentum=0.9)
TASKS = {
    "momentum": MOMENTUM,
    "sgd": make_task(samples=32 * 12),
    "steep": make_task(in_features=784, hidden=[64], out_features=10, batch_size=128, samples=128 * 10, momentum=0.9),
    "adamw": replace(MOMENTUM, optimizer=AdamW(1e-3)),
    "clipped": replace(MOMENTUM, accumulate=2, clip_norm=0.1),
}
SCALE = "its own loss scale (starts at 32768, grows after 2000 steps)"
LATE = "its own loss scale (grows after 2001 steps)"
PLAIN = "no master weights, moments in bf16"
SKIPS = "skips steps whose gradients overflow, though its loss is not scaled"
COMPENSATED = "no master weights, with a compensation"
# No layers of it are seen, and its network has kinks: one rounding is about 10 % of some gradients.
NEARLY_SEEN = ("same", "not seen: ")
ROWS = [
    ("bf16_weights.Bf16Weights", "bf16", "momentum", f"differs as declared: {PLAIN}"),
    ("bf16_weights.Bf16Weights", "bf16", "sgd", "differs as declared: no master weights"),
    ("bf16_weights.Bf16Weights", "bf16", "adamw", f"differs as declared: {PLAIN}"),
    ("bf16_weights.Bf16Weights", "bf16", "clipped", f"differs as declared: {PLAIN}"),
    ("bf16_states.Bf16States", "fp16", "momentum", "differs as declared: moments in bf16"),
    ("bf16_states.Bf16States", "bf16", "adamw", "differs as declared: moments in bf16"),
    ("bf16_states.Bf16States", "bf16", "sgd", "same"),
    ("amp_fused.AmpFused", "bf16", "momentum", "same"),
    ("amp_fused.AmpFused", "fp16", "sgd", "same"),
    ("amp_fused.AmpFused", "fp16", "adamw", "same"),
    ("fsdp2.Fsdp2", "bf16", "momentum", "same"),
    ("fsdp2.Fsdp2", "bf16", "adamw", "same"),
    ("fsdp2.Fsdp2", "fp16", "clipped", "same"),
    ("fabric.FabricRow", "bf16", "momentum", "same"),
    ("fabric.FabricRow", "bf16", "clipped", "same"),
    ("fabric.FabricRow", "fp16", "momentum", "differs: precision (asked for fp16, computes in bf16)"),
    ("fabric.FabricRow plugin", "fp16", "momentum", "same"),
    ("fabric.FabricRow plugin", "fp16", "clipped", "same"),
    ("accelerate.AccelerateRow", "bf16", "momentum", "same"),
    ("accelerate.AccelerateRow", "bf16", "clipped", "same"),
    ("accelerate.AccelerateRow", "fp16", "momentum", "differs: precision (asked for fp16, computes in fp32)"),
    ("keras.KerasRow", "bf16", "momentum", "same"),
    ("keras.KerasRow", "fp16", "momentum", f"differs as declared: {SCALE}"),
    ("keras.KerasRow", "fp16", "clipped", f"differs as declared: {SCALE}"),
    ("keras.KerasRow", "bf16", "adamw", "differs: eps"),
    ("jax.JaxRow", "bf16", "momentum", NEARLY_SEEN),
    ("jax.JaxRow", "bf16", "adamw", NEARLY_SEEN),
    ("jax.JaxRow", "bf16", "clipped", NEARLY_SEEN),
    ("jax.JaxRow", "fp16", "momentum", f"differs as declared: {LATE}"),
    ("jax.JaxRow", "fp16", "clipped", f"differs as declared: {LATE}"),
    ("kahan.Kahan", "bf16", "momentum", f"differs as declared: {COMPENSATED}, moments in bf16"),
    ("kahan.Kahan", "bf16", "sgd", f"differs as declared: {COMPENSATED}"),
    ("kahan.Kahan", "bf16", "adamw", f"differs as declared: {COMPENSATED}, moments in bf16"),
]
FIRST = list({row[0]: row for row in reversed(ROWS)}.values())  # of each class
ELSEWHERE = ("bf16_weights.Bf16Weights", "fsdp2.Fsdp2")  # classes of which another test has a quick case


def backend_of(row):
    """Returns the class of a row, and its options."""
    name, *options = row.split()
    module, cls = name.split(".")
    return getattr(importlib.import_module(f"mpcompare.backends.peers.{module}"), cls), dict.fromkeys(options, True)


def run(backend, precision, task, noise=0, **options):
    return examined(
        backend.__name__,
        backend,
        TASKS[task],
        dataset_of(TASKS[task]),
        precision,
        steps=6,
        noise=noise,
        options=options,
    )


@cache
def amp(precision, task):
    return run(Amp, precision, task, noise=2)


def verdict(backend, precision, task, **options):
    try:
        return judge_run(run(backend, precision, task, **options), amp(precision, task))
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("row", "precision", "task", "said"),
    [pytest.param(*row, marks=[] if row in FIRST and row[0] not in ELSEWHERE else [pytest.mark.slow]) for row in ROWS],
)
def test_what_the_verdict_says(row, precision, task, said):
    backend, options = backend_of(row)
    judged = verdict(backend, precision, task, **options)
    assert str(judged).startswith(said), judged.because


@pytest.mark.slow  # the first engine of a machine compiles an operator for a minute
@pytest.mark.parametrize(
    ("task", "declares", "said"),
    [
        ("momentum", None, f"differs as declared: {SKIPS}"),
        ("clipped", None, f"differs as declared: {SKIPS}"),
        ("steep", None, f"differs as declared: clips to a norm of 1, {SKIPS}"),
        ("steep", Promises(skips_without_scale=True), "differs: clip"),
        ("steep", Promises(clip_norm=1.0), "differs: skip"),
        ("adamw", None, "differs: bias correction"),  # it begins with an update by gradients of 0
    ],
)
def test_deepspeed(task, declares, said):
    backend, _ = backend_of("deepspeed.DeepSpeedRow")
    judged = verdict(backend if declares is None else declaring(backend, declares), "bf16", task)
    assert str(judged) == said, judged.because


@pytest.mark.slow  # its step is compiled
def test_stochastic_rounding():
    backend, _ = backend_of("stochastic_rounding.StochasticRounding")
    judged = verdict(backend, "bf16", "adamw")
    assert str(judged) == "differs as declared: no master weights, rounded at random, moments in bf16", judged.because


class AfterOthers(AmpFused):
    """Fused momentum in memory where other tensors have lain, as in a program that does more than one step."""

    def step(self, lr):
        freed = [torch.full_like(p, 1e3) for p in self.model.parameters()]
        del freed
        super().step(lr)


@pytest.mark.slow
def test_fused_momentum_after_an_overflow_in_the_first_step_is_named():
    judged = verdict(AfterOthers, "fp16", "momentum")
    assert (judged.word, judged.cause) == ("differs", "moments"), judged.because
    assert "momentum_buffer held other numbers than 0 after skipped steps, before the first update" in judged.because


def declaring(backend, promises):
    """Returns the backend with other promises than its own."""

    class Declaring(backend):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.promises = promises

    return Declaring


@pytest.mark.parametrize(
    ("row", "precision", "cause", "because"),
    [
        ("bf16_weights.Bf16Weights", "bf16", "no master weights", "params in bf16"),
        pytest.param("bf16_states.Bf16States", "bf16", "moments", "optimizer in bf16", marks=pytest.mark.slow),
        ("keras.KerasRow", "fp16", "loss scale", "loss scale 32768 in training step 1, where the policy says 65536"),
        ("jax.JaxRow", "fp16", "loss scale", "where the policy says"),
        ("kahan.Kahan", "bf16", "no master weights", "params in bf16"),
    ],
)
def test_what_a_library_changes_is_named_though_it_is_not_declared(row, precision, cause, because):
    judged = verdict(declaring(backend_of(row)[0], NOTHING), precision, "momentum")
    assert (judged.word, judged.cause) == ("differs", cause), judged.because
    assert because in judged.because


@pytest.mark.parametrize(
    "row", ["fsdp2.Fsdp2", *slow_after(0, ["bf16_weights.Bf16Weights", "bf16_states.Bf16States"]), *LIBRARIES]
)
def test_contract(row):
    try:
        assert check_backend(backend_of(row)[0], precision="bf16", tasks={"mlp": small_tasks()["mlp"]}).candidates
    except AssertionError as error:
        if "needs the package" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("row", LIBRARIES)
def test_a_library_that_is_missing_is_unavailable_and_names_its_extra(row, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    (backend, _), task, name = backend_of(row), TASKS["sgd"], row.partition(".")[0]
    monkeypatch.setattr(library.importlib, "import_module", missing)
    with pytest.raises(BackendUnavailable, match=rf"backend={name} needs .*: pip install 'mpcompare\[{name}\]'"):
        backend(task.new_model(0, CPU), task, "bf16", NoLossScale())


@pytest.mark.parametrize("row", ["bf16_weights.Bf16Weights", *LIBRARIES])
def test_a_loss_scale_that_a_row_does_not_have_is_refused(row):
    backend, task = backend_of(row)[0], TASKS["sgd"]
    with pytest.raises(InputError, match="loss_scale=static: "):
        backend(task.new_model(0, CPU), task, "bf16", StaticLossScale())


def test_who_promises_nothing_is_held_to_amp():
    task = TASKS["momentum"]
    backend = Amp(task.new_model(0, CPU), task, "bf16", NoLossScale())
    assert promises_of(backend) == NOTHING


def test_keras_shows_its_products():
    try:
        shows_its_products(backend_of("keras.KerasRow")[0], rectified=True)
    except BackendUnavailable as error:
        pytest.skip(str(error))
