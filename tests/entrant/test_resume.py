"""A resumed run equals the uninterrupted one bit for bit, and another backend continues from the same state."""

import copy
import json
import logging
import math
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backends import BACKENDS, each_backend
from support.command import SMALL
from support.plans import SMALL_PLAN, replan
from support.tasks import make_task

from mpcompare import generators
from mpcompare.backends.fp32 import Fp32
from mpcompare.checkpoints import CHECKPOINTS, Checkpoint, load, newest, save
from mpcompare.contract import options_of
from mpcompare.entrant import resume, training
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.setup import Setup
from mpcompare.entrant.state import Start
from mpcompare.errors import InputError
from mpcompare.fields import SetUpRecord
from mpcompare.instruments.clock import clock
from mpcompare.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.race.orders import Train
from mpcompare.race.timetable import TRAINING
from mpcompare.records import RunRecorder
from mpcompare.report.comparison import compare
from mpcompare.report.runs import find_runs, read_run
from mpcompare.report.verdicts import judge_all as judge
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Constant, Cosine, Warmup
from mpcompare.verdict.examine.noise import train_again
from mpcompare.verdict.examine.resume import lost_entries
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.verdict import RESUMED

CPU = torch.device("cpu")
TASK = make_task(in_features=6, hidden=[5], out_features=3, batch_size=8)
TRAINED = {"task": {"lr": 0.1}, "seed": 0, "backend": "amp", "precision": "fp16", "loss_scale": "dynamic"}

# ---- any backend, any task, any step

OPTIMIZERS = [
    Sgd(0.1), Sgd(0.1, 0.9), Sgd(0.1, 0.9, True, 0.01), Sgd(0.1, weight_decay=0.1), Adam(0.02), Adam(0.02, (0.8, 0.9)),
    AdamW(0.02), AdamW(0.02, weight_decay=0.0),
]  # fmt: skip


@st.composite
def cases(draw):
    """Draws a task, its data with inputs that overflow here and there, and the step at which training stops."""
    total = draw(st.integers(2, 9))
    schedule = draw(st.sampled_from([Constant(), Warmup(4), Cosine(), Cosine(6, 2), Cosine(warmup_steps=1)]))
    accumulate = draw(st.sampled_from([1, 1, 2, 4]))
    clip_norm, norm_type = draw(st.sampled_from([(None, 2.0), (0.5, 2.0), (0.1, math.inf)]))
    task = replace(
        TASK, optimizer=draw(st.sampled_from(OPTIMIZERS)), schedule=schedule.over(total), accumulate=accumulate,
        clip_norm=clip_norm, clip_norm_type=norm_type,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x, y = torch.randn(29, 6, generator=generator), torch.randint(3, (29,), generator=generator)
    for batch in draw(st.sets(st.integers(0, 2), max_size=2)):  # three whole batches; the data come round
        x[8 * batch + draw(st.integers(0, 7))] = draw(st.sampled_from([math.inf, 1e6, math.nan]))
    policy = draw(
        st.one_of(
            st.builds(
                DynamicLossScale, st.sampled_from([2.0**4, 2.0**16, 2.0**30]),
                backoff_factor=st.sampled_from([0.5, 0.01]), growth_interval=st.integers(1, 4),
            ),
            st.just(StaticLossScale(256.0)),
            st.just(NoLossScale()),
        )
    )  # fmt: skip
    return task, Dataset("drawn", "a test", x, y, x, y), policy, total, draw(st.integers(1, total - 1))


def setup_of(name, precision, device, task, dataset, policy):
    """Returns a setup as ``set_up`` makes it."""
    policy = NoLossScale() if name == "fp32" else policy
    options = {"engine": "native"} if "engine" in options_of(BACKENDS[name]) else {}

    def make(model, policy):
        return BACKENDS[name](model, task, precision, replace(policy), **options)

    model = task.new_model(0, device)
    return Setup(
        device=device, record=SetUpRecord(precision, "", policy.name, 0.0, "", "", "", "", ""), loss_scale=policy,
        model=model, lent={}, task=task, make_backend=make, dataset=dataset.to(device), clock=clock(device),
    )  # fmt: skip


def take(stepper, stream, steps):
    """Returns the bits of all that each step shows."""
    return [
        (
            bits(stepper.rates.now), bits(stepper.backend.loss_scale()), bits(stepper.step(batch)),
            bool(stepper.backend.skipped), bits(stepper.backend.grad_norm),
        )
        for batch in islice(stream, steps)
    ]  # fmt: skip


def bits(number):
    return None if number is None else struct.pack("d", float(number)).hex()


def what_is_trained(setup):
    return {**TRAINED, "loss_scale": setup.loss_scale.name}


def left_at(folder, setup, stepper, step):
    """Returns the point to resume from, saved after a step and loaded again."""
    backend, updates = stepper.backend, int(stepper.rates.updates)
    save(folder, training.checkpoint_of(backend, step, updates, what_is_trained(setup), setup.device))
    return resume.fit(load(folder), what_is_trained(setup), setup.loss_scale, folder)


def continues_bit_for_bit(folder, setup, total, at):
    whole, stream = setup.new_stepper(), setup.batches()
    take(whole, stream, at)
    start = left_at(folder, setup, whole, at)
    expected = take(whole, stream, total - at)
    resumed = Start(setup, start).new_stepper()
    assert lost_entries(start.state, resumed.backend.state_dict()) == []
    assert take(resumed, setup.batches(start.position), total - at) == expected
    ends = whole.backend.state_dict(), resumed.backend.state_dict()
    assert lost_entries(*ends) == lost_entries(*reversed(ends)) == []
    assert int(whole.rates.updates) == int(resumed.rates.updates)


def property_test(quick, deep):
    """Parametrises ``examples``: few in the plain command, many in the slow one."""
    return pytest.mark.parametrize("examples", [quick, pytest.param(deep, marks=pytest.mark.slow)])


def any_run_continues_bit_for_bit(name, precision, device, examples, tmp_path_factory):
    @settings(max_examples=examples)
    @given(cases())
    def check(case):
        *how, total, at = case
        continues_bit_for_bit(tmp_path_factory.mktemp("run"), setup_of(name, precision, device, *how), total, at)

    check()


@each_backend
@property_test(3, 100)
def test_any_run_continues_bit_for_bit(name, precision, device, examples, tmp_path_factory):
    any_run_continues_bit_for_bit(name, precision, device, examples, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("precision", BACKENDS["amp_compile"].PRECISIONS)
def test_any_compiled_run_continues_bit_for_bit(precision, tmp_path_factory):
    any_run_continues_bit_for_bit("amp_compile", precision, CPU, 100, tmp_path_factory)  # compiles three batch sizes


# amp_graph shares its state with amp, and takes a capture a time.
OTHERS = [
    ("amp", "fp16"), ("amp", "bf16"), ("scratch", "fp16"), ("scratch", "fp32"), ("fused", "fp16"), ("fused", "bf16"),
    ("master_weights", "fp16"), ("fp32", "fp32"),
]  # fmt: skip
CHAIN = [("amp", "fp16"), ("scratch", "fp16"), ("fused", "fp16"), ("fp32", "fp32")]


@pytest.mark.slow
@property_test(10, 300)
def test_any_backend_continues_from_the_exact_state_of_another(examples, tmp_path_factory):
    @settings(max_examples=examples)
    @given(cases(), st.just(CHAIN) | st.lists(st.sampled_from(OTHERS), min_size=2, max_size=4))
    def check(case, chain):
        *how, _, _ = case
        folder, start, step = tmp_path_factory.mktemp("run"), None, 0
        for name, precision in chain:
            setup = setup_of(name, precision, CPU, *how)
            if start is None:
                stepper = setup.new_stepper()
            else:
                start = resume.fit(load(folder), what_is_trained(setup), setup.loss_scale, folder)
                stepper = Start(setup, start).new_stepper()
                assert_same_state(load(folder).state, stepper.backend.state_dict())
                assert int(stepper.rates.updates) == start.updates
            take(stepper, setup.batches(step), 2)
            step += 2
            start = left_at(folder, setup, stepper, step)

    check()


def assert_same_state(given, found):
    """Asserts that two states are equal bit for bit. Moments that an optimizer does not have yet are 0, and loss scales
    are compared if they are of the same kind."""
    for state, other in ((given, found), (found, given)):
        for kind, tensors in state["optimizer"].items():
            for name, tensor in tensors.items():
                there = other["optimizer"].get(kind, {}).get(name, torch.zeros_like(tensor))
                assert there.dtype == tensor.dtype
                assert there.numpy().tobytes() == tensor.numpy().tobytes(), (kind, name)
    bare = {"optimizer": {}, "loss_scale": {}}
    assert lost_entries({**given, **bare}, found) == lost_entries({**found, **bare}, given) == []
    common = set(given["loss_scale"]) & set(found["loss_scale"])
    if {"scale", "growth_tracker"} <= common:
        assert all(given["loss_scale"][key] == found["loss_scale"][key] for key in common)


def test_a_batch_is_found_without_serving_those_before_it():
    x = torch.arange(29)
    dataset = Dataset("d", "r", x, x, x, x)
    for served in range(9):
        expected = [x.tolist() for x, _ in islice(batches(dataset, 8), served, served + 5)]
        assert [x.tolist() for x, _ in islice(batches(dataset, 8, served), 5)] == expected
    assert next(batches(dataset, 8, 3 * 10**15 + 1))[0].tolist() == list(range(8, 16))


# ---- generators


def drawn():
    return [torch.rand(3).tolist(), random.gauss(0, 1), np.random.normal(size=3).tolist()]


@pytest.mark.parametrize("name", ["cpu", "python", "numpy"])
def test_a_state_that_is_none_of_a_generator_is_one_line(name):
    named = generators.saved(CPU)
    for state in (named[name][:-1], torch.zeros(3), torch.frombuffer(bytearray(b"[[[]]]"), dtype=torch.uint8)):
        with pytest.raises(InputError, match="^resume=generators: expected states of torch, Python and numpy"):
            generators.restore({name: state}, CPU)
    generators.restore(named, CPU)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state["params"].pop("layer1.weight"), "its params lack layer1.weight"),
        (
            lambda state: state["params"].update({"layer1.weight": torch.ones(2)}),
            r"holds params layer1.weight of shape \[2",
        ),
        (
            lambda state: state["params"].update(other=torch.ones(2)),
            r"other of shape \[2\], and this network has no such",
        ),
        (
            lambda state: state["buffers"].update(other=torch.ones(())),
            r"holds buffers other of shape \[\], and this netw",
        ),
        (
            lambda state: state["optimizer"]["exp_avg"].update({"layer1.bias": torch.ones(1)}),
            "exp_avg layer1.bias of sh",
        ),
    ],
)
def test_tensors_of_another_network_are_one_line(change, said):
    policy = NoLossScale()
    setup = setup_of(
        "fp32", "fp32", CPU, replace(TASK, optimizer=Adam(0.1)), Dataset("d", "", *[torch.ones(0)] * 4), policy
    )
    stepper = setup.new_stepper()
    stepper.step(setup.task.micro_batches(torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)))
    saved = Checkpoint(copy.deepcopy(stepper.backend.state_dict()), 1, 1, 1, what_is_trained(setup))
    resume.check_tensors(saved, setup.model, None)
    change(saved.state)
    with pytest.raises(InputError, match=said):
        resume.check_tensors(saved, setup.model, None)


def test_generators_continue_where_they_were(tmp_path):
    random.gauss(0, 1), np.random.normal()  # each generator keeps a second number
    start = Checkpoint(
        {"params": {}, "buffers": {}, "optimizer": {}, "loss_scale": {}}, 1, 1, 1, {}, generators.saved(CPU)
    )
    save(tmp_path, start)
    expected = drawn()
    assert drawn() != expected
    generators.restore(load(tmp_path).generators, CPU)
    assert drawn() == expected
    before = generators.saved(CPU)
    generators.restore({}, CPU)  # a checkpoint without generators
    assert all(torch.equal(before[name], state) for name, state in generators.saved(CPU).items())


class Noisy(Fp32):
    """``fp32`` that draws from every generator in each step."""

    def step(self, lr):
        super().step(lr)
        for p in self.master_params().values():
            p.add_(torch.randn_like(p), alpha=1e-3 * (1 + random.random() + np.random.random()))


# ---- the parts of a resumed run

PLAN = replan(
    SMALL_PLAN, task=make_task(in_features=784, out_features=10, momentum=0.9), train={"steps": 8, "warmup_steps": 2},
    task_config={"optimizer": {"lr": 0.1}, "batch_size": 32, "clip_norm": None},
)  # fmt: skip


def trained(plan, folder):
    """Trains as planned. Returns the steps without their times."""
    folder.mkdir()
    if plan.resume.folder is None:
        plan.dataset()  # imports scikit-learn, which draws from Python's generator the first time
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
    turns = compete(plan, RunRecorder(folder, {"config": {}}))
    next(turns)
    event = turns.send(Train())
    while event.done < plan.train.last_step:
        event = next(turns)
    turns.close()
    return pd.read_csv(folder / "steps.csv", dtype=str).drop(columns="step_ms")


def refused(plan, folder, message):
    with pytest.raises(InputError) as said:
        trained(plan, folder)
    assert str(said.value).startswith(message)
    assert "\n" not in str(said.value)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "schedule"), [(Fp32, Cosine()), (Noisy, Constant())])
def test_a_run_ends_as_if_it_had_not_been_interrupted(tmp_path, cls, schedule):
    task = replace(PLAN.task, schedule=schedule)
    plan = replan(PLAN, make_backend=cls, task=task, train={"checkpoint_every": 1})
    whole = trained(plan, tmp_path / "whole")
    assert trained(replan(plan, train={"checkpoint_every": 6}), tmp_path / "six").equals(whole)
    assert load(tmp_path / "six").step == 10  # the last step has a checkpoint in any case
    six = tmp_path / "six" / CHECKPOINTS / "step-000006"
    for step, checkpoint in ((6, six), (9, tmp_path / "whole" / CHECKPOINTS / "step-000009")):
        again = tmp_path / str(step)
        assert trained(replan(plan, resume={"folder": checkpoint}), again).equals(whole[step:].reset_index(drop=True))
        ends = [load(folder) for folder in (tmp_path / "whole", again)]
        assert ends[0].step == ends[1].step == 10
        assert lost_entries(ends[0].state, ends[1].state) == []
        assert all(torch.equal(g, ends[1].generators[name]) for name, g in ends[0].generators.items())
        assert json.loads((again / "result.json").read_text())["resumed_from"] == {
            "path": str(checkpoint), "step": step, "backend": "fp32", "precision": "fp32",
            "weights": fingerprint(load(checkpoint).state["params"]),
        }  # fmt: skip


def test_no_checkpoint_is_written_unless_asked_for(tmp_path):
    trained(PLAN, tmp_path / "run")
    assert not (tmp_path / "run" / CHECKPOINTS).exists()


def test_every_step_of_a_checkpoint_is_in_the_record(tmp_path, monkeypatch):
    seen = []

    def counted(folder, checkpoint, keep=2):
        seen.append((checkpoint.step, pd.read_csv(folder.parent / "steps.csv")["step"].tolist()))

    monkeypatch.setattr(training, "save", counted)
    trained(replan(PLAN, train={"checkpoint_every": 3}), tmp_path / "run")
    assert seen == [(step, list(range(1, step + 1))) for step in (3, 6, 9, 10)]


class OnAGpu(torch.Tensor):
    """Stands for a flag that only a GPU knows."""

    is_cuda = True


class SkipsThree(Fp32):
    """``fp32`` that skips its first three steps, and lets only a GPU know."""

    taken = 0

    def step(self, lr):
        self.taken += 1
        skipped = self.taken <= 3
        if not skipped:
            super().step(lr)
        self.skipped = torch.tensor(float(skipped)).as_subclass(OnAGpu)


def test_a_checkpoint_counts_no_skipped_step_as_an_update(tmp_path):
    plan = replan(PLAN, make_backend=SkipsThree, train={"checkpoint_every": 5})
    trained(plan, tmp_path / "whole")
    five = tmp_path / "whole" / CHECKPOINTS / "step-000005"
    trained(replan(plan, resume={"folder": five}), tmp_path / "again")
    saved = load(five), load(tmp_path / "whole"), load(tmp_path / "again")
    assert [(each.step, each.updates) for each in saved] == [(5, 2), (10, 7), (10, 4)]


@pytest.mark.slow
def test_saving_is_no_part_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "save", lambda *args: time.sleep(0.5))
    trained(replan(PLAN, train={"checkpoint_every": 2, "steps": 4}), tmp_path / "run")
    assert pd.read_csv(tmp_path / "run" / "steps.csv")["step_ms"].max() < 400


@pytest.fixture
def left(tmp_path):
    """Returns the folder of a run that was left after its checkpoints 5 and 10."""
    trained(replan(PLAN, train={"checkpoint_every": 5}), tmp_path / "left")
    return tmp_path / "left"


def test_a_run_that_resumes_says_where_its_training_begins(left, tmp_path):
    plan = replan(PLAN, resume={"folder": left / CHECKPOINTS / "step-000005"})
    (tmp_path / "again").mkdir()
    turns = compete(plan, RunRecorder(tmp_path / "again", {"config": {}}))
    next(turns)
    event = turns.send(Train())
    while event.stage != TRAINING:
        event = next(turns)
    turns.close()
    assert (event.done, event.total) == (5, 10)


def test_what_else_is_trained_is_one_line(left, tmp_path):
    plan = replan(PLAN, resume={"folder": left}, train={"steps": 20})
    said = f"resume={left}: was trained with "
    config = {**PLAN.task_config, "batch_size": 64}
    message = said + "task.batch_size=32, this run has task.batch_size=64"
    refused(replan(plan, task_config=config), tmp_path / "a", message)
    other = {"optimizer": {"lr": 0.2, "momentum": 0.9}, "batch_size": 64, "clip_norm": math.inf, "loss": "mse"}
    message = (
        said + "task.optimizer.lr=0.1, task.batch_size=32, task.clip_norm=None, this run has task.optimizer.lr=0.2, "
        "task.batch_size=64, task.clip_norm=inf; and 2 more differ"
    )
    refused(replan(plan, task_config=other), tmp_path / "b", message)
    refused(replan(plan, seed=1), tmp_path / "c", said + "seed=0, initial_weights=")
    refused(replan(plan, load_data=partial(digits, samples=128)), tmp_path / "d", said + "dataset_fingerprint=")
    task = make_task(in_features=784, hidden=[25], out_features=10)
    refused(replan(plan, task=task), tmp_path / "e", said + "initial_weights=")
    cosine = replace(PLAN.task, schedule=Cosine())
    refused(replan(plan, task=cosine), tmp_path / "f", said + "schedule_updates=0, this run has schedule_updates=22")
    assert trained(plan, tmp_path / "more")["step"].tolist() == [str(step) for step in range(11, 23)]


def test_nothing_to_resume_from_is_one_line(left, tmp_path, caplog):
    def resumed(path, name, older=False, steps=8):
        return replan(PLAN, resume={"folder": path, "older": older}, train={"steps": steps}), tmp_path / name

    (tmp_path / "empty").mkdir()
    refused(*resumed(tmp_path / "empty", "a"), f"resume={tmp_path / 'empty'}: holds no checkpoint")
    refused(*resumed(tmp_path / "nope", "b"), f"resume={tmp_path / 'nope'}: no such folder")
    message = f"resume={left}: has taken 10 steps, and this run ends after 5 (train.warmup_steps + train.steps)"
    plan, folder = resumed(left, "c")
    refused(replan(plan, train={"steps": 3}), folder, message)
    last = newest(left / CHECKPOINTS)
    refused(*resumed(last, "named"), f"resume={last}: has taken 10 steps, and this run ends after 10 ")
    assert trained(*resumed(left, "again"))["step"].tolist() == ["6", "7", "8", "9", "10"]
    file = newest(left / CHECKPOINTS) / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused(*resumed(left, "d", steps=9), f"resume={left}: step-000010: state.safetensors has ")
    with caplog.at_level(logging.WARNING):
        steps = trained(*resumed(left, "e", older=True, steps=9))
    assert steps["step"].tolist() == ["6", "7", "8", "9", "10", "11"]
    assert "continues from the older step-000005, because of step-000010" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"checkpoint_every": 0}}, "checkpoint_every=0: expected a whole number of at least 1, or null"),
        ({"train": {"checkpoint_every": 1.5}}, "train.checkpoint_every=1.5: expected a whole number of at least 1"),
        ({"resume": {"older": "maybe"}}, "resume_older=maybe: expected true or false"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_one_line(change, message):
    with pytest.raises(InputError, match=re.escape(message)):
        replan(PLAN, **change)


# ---- the loss scale of another policy


@pytest.mark.parametrize(
    ("saved_by", "policy", "expected"),
    [
        ("dynamic", DynamicLossScale(), {"scale": 8.0, "growth_tracker": 5}),
        ("dynamic", DynamicLossScale(growth_interval=3), {"scale": 8.0, "growth_tracker": 2}),
        ("dynamic", StaticLossScale(256.0), {}),
        ("dynamic", NoLossScale(), {}),
        ("static", DynamicLossScale(), {}),
        ("static", StaticLossScale(256.0), {}),
        ("none", DynamicLossScale(), {}),
    ],
)
def test_a_loss_scale_goes_on_only_from_one_of_its_kind(saved_by, policy, expected):
    trained = {**TRAINED, "loss_scale": saved_by}
    scale = {} if saved_by == "none" else {"scale": 8.0, "growth_tracker": 5}
    state = {"params": {}, "buffers": {}, "optimizer": {}, "loss_scale": scale}
    saved = Checkpoint(state, 7, 6, 7, trained)
    assert resume.fit(saved, TRAINED, policy, None).state["loss_scale"] == expected
    assert saved.state["loss_scale"] == scale


def test_noise_of_a_resumed_run_begins_where_it_began(tmp_path):
    task = replace(TASK, optimizer=Sgd(0.1, 0.9), schedule=Cosine(12))
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    policy = DynamicLossScale(2.0**10, growth_interval=3)
    setup = setup_of("scratch", "fp16", CPU, task, Dataset("d", "r", x, y, x, y), policy)
    stepper, stream = setup.new_stepper(), setup.batches()
    take(stepper, stream, 7)
    start = left_at(tmp_path, setup, stepper, 7)
    losses = [float(stepper.step(batch)) for batch in islice(stream, 5)]
    subject = Subject(
        setup.make_backend, setup.model, setup.loss_scale, PRECISIONS["fp16"], task, setup.batches, start=start
    )
    rows = [{"step": 8 + i, "skipped": True} for i in range(5)]  # skipped, so that the run keeps the loss scale
    again = train_again(subject, rows, 0, 1)
    while True:
        try:
            next(again)
        except StopIteration as end:
            noise = end.value.losses
            break
    assert noise == pytest.approx(losses, rel=2**-8)
    assert noise != losses


# ---- by command

RUN = (*SMALL, "train.steps=11", "optimizer=momentum", "schedule=cosine")


def read(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_a_sweep_resumes_and_says_so(cli, tmp_path):
    """Both runs resume from one checkpoint of amp, and each is judged on the steps that it took."""
    quiet = ("hydra/launcher=basic", "verdict.noise=2")
    command = (*RUN, "backend=amp", "precision=fp16", "task.batch_size=32", "train.checkpoint_every=5")
    assert cli(*command, "hydra.run.dir=amp", "verdict.enabled=false").code == 0
    sweep = ("backend=amp,scratch", "precision=fp16", "task.batch_size=32")
    ended = cli("-m", *RUN, *quiet, *sweep, "resume=amp", "hydra.sweep.dir=sweep")
    assert ended.code == 0, ended.err
    assert re.search(r"^amp fp16.*, scratch fp16.*: resumed from step 10 of amp fp16 \(amp\)$", ended.out, re.MULTILINE)
    summary = pd.read_csv(tmp_path / "sweep" / "report" / "summary.csv")
    assert summary["verdict"].tolist() == ["reference", "same"]
    assert summary["resumed_from"].tolist() == ["step 10 of amp fp16 (amp)"] * 2
    whole, amp, scratch = (
        pd.read_csv(tmp_path / folder / "steps.csv") for folder in ("amp", "sweep/0-amp-fp16", "sweep/1-scratch-fp16")
    )
    for steps in (amp, scratch):
        assert steps["step"].tolist() == [11, 12]
        assert steps["lr"].tolist() == whole["lr"][10:].tolist()
    assert amp["loss"].tolist() == whole["loss"][10:].tolist()
    assert scratch["loss"].tolist() == pytest.approx(amp["loss"].tolist(), rel=1e-3)
    assert read(tmp_path / "sweep" / "1-scratch-fp16")["resumed_from"]["step"] == 10
    findings = read_run(tmp_path / "sweep" / "1-scratch-fp16").findings
    assert (findings.resume.lost, findings.loss_scale) == ([], None)

    # If scratch had begun elsewhere, the verdict would take its training for a different one.
    other = read(tmp_path / "sweep" / "1-scratch-fp16")
    other["resumed_from"]["weights"] = "f00d"
    (tmp_path / "sweep" / "1-scratch-fp16" / "result.json").write_text(json.dumps(other))
    (comparison,) = compare(find_runs([tmp_path / "sweep"]), "amp")
    verdict = judge(comparison)["1-scratch-fp16"]
    assert verdict.word == "same"
    assert RESUMED in verdict.unchecked
    assert not [check for check in verdict.checks if check.cause == "run"]


BAD = {
    "another task": (["resume=left", "task.batch_size=32"], "resume=left: was trained with task.batch_size=64, this "),
    "no checkpoint": (["resume=left/.hydra"], "resume=left/.hydra: holds no checkpoint"),
    "no folder": (["resume=nope"], "resume=nope: no such folder"),
    "a number": (["resume=7"], "resume=7: no such folder"),
    "done": (["resume=left", "train.steps=4"], "resume=left: has taken 5 steps, and this run ends after 5"),
    "every 0": (["train.checkpoint_every=0"], "train.checkpoint_every=0: expected a whole number of at least 1"),
    "older a word": (["resume_older=maybe"], "resume_older=maybe: expected true or false"),
}


@pytest.mark.slow
def test_bad_input_is_one_line_and_an_exit_code(cli, tmp_path):
    assert cli(*SMALL, "verdict.enabled=false", "train.checkpoint_every=5", "hydra.run.dir=left").code == 0
    (tmp_path / "left" / ".hydra").mkdir(exist_ok=True)
    for number, (arguments, message) in enumerate(BAD.values()):
        ended = cli(*SMALL, "train.steps=9", *arguments, f"hydra.run.dir=bad{number}")
        assert ended.code == 2
        (line,) = [line for line in ended.err.splitlines() if not line.startswith("[")]
        assert line.startswith(f"mpcompare: error: {message}")


# ---- kill -9


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 50])
def test_a_kill_loses_no_more_than_the_steps_since_the_last_checkpoint(tmp_path, kills):
    script = Path(__file__).parents[1] / "support" / "killed_runs.py"
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "runs"), str(kills)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=as_a_user(OMP_NUM_THREADS="1"), check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def as_a_user(**more):
    path = os.pathsep.join(map(str, Path(__file__).parents[1:3]))  # tests and the repository
    return {**os.environ, "PYTHONPATH": path, **more}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("amp", 0), ("scratch", 1)])
def test_a_command_that_is_killed_resumes(request, tmp_path, name, seed):
    command = [
        sys.executable, "-m", "mpcompare", *RUN, f"backend={name}", "verdict.enabled=false", "train.checkpoint_every=1",
        "train.steps=400",
    ]  # fmt: skip
    run = partial(subprocess.run, cwd=tmp_path, env=as_a_user(), capture_output=True, text=True, timeout=300)
    assert run([*command, "hydra.run.dir=whole"], check=False).returncode == 0
    process = subprocess.Popen(
        [*command, "hydra.run.dir=killed"], cwd=tmp_path, env=as_a_user(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    request.addfinalizer(process.kill)
    deadline = time.time() + 200
    while not list((tmp_path / "killed").glob("checkpoints/step-*")):
        assert process.poll() is None
        assert time.time() < deadline
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0, 1))
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = load(tmp_path / "killed").step
    assert step < 401, "it was done before it was killed"
    ended = run([*command, "hydra.run.dir=resumed", "resume=killed", "resume_older=true"], check=False)
    assert ended.returncode == 0, ended.stderr
    whole, killed, resumed = (
        pd.read_csv(tmp_path / folder / "steps.csv", dtype=str).drop(columns="step_ms")
        for folder in ("whole", "killed", "resumed")
    )
    assert len(killed) - step in (0, 1)  # a step is written before its checkpoint
    assert killed.equals(whole[: len(killed)])
    assert resumed.equals(whole[step:].reset_index(drop=True))
    assert lost_entries(load(tmp_path / "whole").state, load(tmp_path / "resumed").state) == []
