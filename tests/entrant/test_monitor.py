"""Monitored steps: the right numbers are counted, and the step stays the same."""

import math
import time
from dataclasses import replace

import pandas as pd
import pytest
import torch
from support.entrants import AT_START, PLAN, turn
from support.plans import replan
from support.tasks import make_task

from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.fused import Fused
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.scratch import Scratch
from mpcompare.contract import Stepper
from mpcompare.entrant import monitor as looking
from mpcompare.entrant.entrant import compete
from mpcompare.entrant.monitor import Monitor, gradient_shares, lost_share, moving
from mpcompare.errors import InputError
from mpcompare.instruments.clock import CpuClock
from mpcompare.loss_scale import DynamicLossScale, NoLossScale
from mpcompare.precision import BF16, FP16, FP32
from mpcompare.race.orders import Train
from mpcompare.records import MONITORED, RunRecorder
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.groups import Group
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("format", "values", "scale", "zero", "subnormal", "nonfinite"),
    [
        (FP16, [0.0, -0.0, 2.0**-24, -(2.0**-14), 1.0, INF, -INF, NAN], 1.0, 2, 1, 3),
        (FP16, [2.0**-34, 2.0**-25, 2.0**-24, 2.0**-24, 1.0], 1024.0, 0, 2, 0),  # normal from 2^-24 on
        (BF16, [2.0**-24, 2.0**-126, 2.0**-127, 0.0], 1.0, 1, 1, 0),
        (FP32, [2.0**-24, 2.0**-126, 2.0**-149, 0.0], 1.0, 1, 1, 0),
    ],
)
def test_shares_of_constructed_gradients(format, values, scale, zero, subnormal, nonfinite):
    grads = {"a": torch.tensor(values[:2]).reshape(1, 2), "b": torch.tensor(values[2:])}
    shares = gradient_shares(grads, scale, format)
    assert shares == {
        "grad_zero": zero / len(values),
        "grad_subnormal": subnormal / len(values),
        "grad_nonfinite": nonfinite / len(values),
    }


@pytest.mark.parametrize("scale", [1.0, 3.0, 1000.0, 65536.0, 0.1])
def test_what_was_subnormal_before_it_was_unscaled_is_told_whatever_the_scale(scale):
    every = torch.arange(2**15 - 2**10, dtype=torch.int16).view(torch.float16)  # all that are finite and not negative
    unscaled = every.float() * (1 / scale)
    assert gradient_shares({"g": unscaled}, scale, FP16) == {
        "grad_zero": 1 / len(every), "grad_subnormal": 1023 / len(every), "grad_nonfinite": 0.0,
    }  # fmt: skip


def test_updates_that_half_the_gap_beside_their_weight_swallows_are_lost():
    before = {"w": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])}
    change = torch.tensor([2.0**-25, 2.0**-23, 0.0, 2.0**-100, 2.0**-26])
    after = {"w": before["w"] + change}
    moves = moving({"w": change != 0}, {}, before, [])
    assert lost_share(before, after, moves) == 2 / 4  # the first and the last are lost; the third is not to move
    assert lost_share(before, before, {"w": torch.zeros(5, dtype=torch.bool)}) is None


def test_a_momentum_or_a_decay_moves_what_has_no_gradient():
    weights = {"w": torch.tensor([0.0, 1.0, 2.0])}
    nonzero = {"w": torch.tensor([False, False, True])}
    for kind in ("momentum_buffer", "exp_avg"):
        remembered = {kind: {"w": torch.tensor([3.0, 0.0, 3.0])}, "exp_avg_sq": {"w": torch.ones(3)}}
        assert moving(nonzero, remembered, weights, [])["w"].tolist() == [True, False, True]
    assert moving(nonzero, {}, weights, [])["w"].tolist() == [False, False, True]
    assert moving(nonzero, {}, weights, ["w"])["w"].tolist() == [False, True, True]


class InOnePiece(Fp32):
    """``fp32`` whose step is in one piece, so that its gradients are seen after the step, clipped."""

    IDLE_PHASES = ()

    def train_step(self, batches, lr):
        self.optimizer.zero_grad()
        loss = self.forward(*batches[0])
        self.backward()
        self.clip()
        self.step(lr)
        return loss


TASK = make_task(in_features=784, out_features=10)
PLAN = replan(PLAN, train={"steps": 8, "warmup_steps": 1})


def train(folder, **changes):
    """Runs up to the first block. Returns ``steps.csv`` and the trained weights."""
    folder.mkdir()
    weights = {}
    plan = replan(PLAN, **changes)

    class Kept(plan.make_backend):
        def state_dict(self):
            state = super().state_dict()
            weights.update({name: p.clone() for name, p in state["params"].items()})
            return state

    turns = compete(replan(plan, make_backend=Kept), RunRecorder(folder, AT_START))
    turn(turns, None)
    turn(turns, Train())
    turns.close()
    return pd.read_csv(folder / "steps.csv"), weights


SCALE = DynamicLossScale(init_scale=2.0**24, growth_interval=2)  # skips in the beginning, and again and again


@pytest.mark.parametrize(
    ("cls", "precision", "policy", "optimizer", "more"),
    [
        (Amp, "fp16", SCALE, AdamW(0.01), {"accumulate": 2}),
        (InOnePiece, "fp32", NoLossScale(), Sgd(0.1, 0.9), {"clip_norm": 0.5}),
        pytest.param(MasterWeights, "fp16", SCALE, Adam(0.01), {"clip_norm": 0.5}, marks=pytest.mark.slow),
        pytest.param(Fp32, "fp32", NoLossScale(), Sgd(0.1, 0.9), {}, marks=pytest.mark.slow),
        pytest.param(Scratch, "fp16", SCALE, Sgd(0.1), {"clip_norm": 0.5}, marks=pytest.mark.slow),
        pytest.param(Fused, "bf16", NoLossScale(), Sgd(0.1, 0.9), {}, marks=pytest.mark.slow),
    ],
)
def test_looking_changes_no_bit_of_training(tmp_path, cls, precision, policy, optimizer, more):
    task = replace(TASK, optimizer=optimizer, **more)
    run = {"make_backend": cls, "precision": precision, "loss_scale": policy, "task": task}
    steps, weights = train(tmp_path / "0", **run)
    monitored, same = train(tmp_path / "1", **run, monitor={"every": 1})
    own = [*MONITORED, "step_ms", *([] if more.get("clip_norm") else ["grad_norm"])]
    pd.testing.assert_frame_equal(steps.drop(columns=own), monitored.drop(columns=own), check_exact=True)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert steps[list(MONITORED)].isna().all(axis=None)
    assert monitored[list(MONITORED[:3])].notna().all(axis=None)
    assert (monitored["lost_updates"].isna() == monitored["skipped"]).all()  # a skipped step has no update to lose
    assert monitored["grad_norm"][~monitored["skipped"]].gt(0).all()
    assert (monitored["skipped"] == (monitored["grad_nonfinite"] > 0)).all()
    assert monitored["skipped"].any() == (policy is SCALE)


@pytest.mark.slow
def test_every_so_many_steps_are_looked_into_and_every_step_has_its_time(tmp_path, monkeypatch):
    def slowly(*args):
        time.sleep(0.5)
        return gradient_shares(*args)

    monkeypatch.setattr(looking, "gradient_shares", slowly)
    steps, _ = train(tmp_path / "0", monitor={"every": 4})
    assert steps["step"].tolist() == list(range(1, 10))
    assert steps["step"][steps["grad_zero"].notna()].tolist() == [4, 8]
    assert steps["step"][steps["grad_norm"].notna()].tolist() == [4, 8]
    assert ((steps["step_ms"] > 0) & (steps["step_ms"] < 400)).all()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Sgd(1e-12), Adam(1e-12)])
def test_with_a_tiny_rate_all_updates_of_weights_are_lost(tmp_path, optimizer):
    steps, _ = train(tmp_path / "0", task=replace(TASK, optimizer=optimizer), monitor={"every": 3})
    share = steps["lost_updates"].dropna()
    assert len(share) == 3
    # Of the biases, a tenth of a percent of all, some are next to 0.
    assert (share > 0.99).all()


@pytest.mark.slow
def test_without_fp32_masters_far_more_updates_are_lost(tmp_path):
    task = replace(TASK, optimizer=Sgd(1e-3))
    run = {"make_backend": Scratch, "precision": "bf16", "task": task, "monitor": {"every": 4}}
    masters, _ = train(tmp_path / "0", **run)
    none, _ = train(tmp_path / "1", **run, options={"master_params": False})
    assert masters["lost_updates"].max() < 0.05
    assert none["lost_updates"].min() > 0.5


def look(cls, task, format=FP16):
    backend = cls(task.new_model(0, torch.device("cpu")), task, "fp32", NoLossScale())
    stepper, data = Stepper(backend, task.new_rates()), digits(0, 96)
    batch = [(data.x_train[:32], data.y_train[:32])]
    clock = CpuClock()
    monitor = Monitor(task, format, clock)
    seen = [monitor.step(stepper, batch) for _ in range(3)]
    return [shares for _, shares, _ in seen], [pieces for _, _, pieces in seen], clock.read()


def test_of_a_step_in_one_piece_the_gradients_are_those_before_clipping():
    task = replace(TASK, clip_norm=2.0**-20)
    phased, two, intervals = look(Fp32, task)
    whole, one, fewer = look(InOnePiece, task)
    assert (two, len(intervals)) == ([2, 2, 2], 11)
    assert (one, len(fewer)) == ([1, 1, 1], 5)
    for mine, theirs in zip(phased, whole, strict=True):
        # A product with the clip factor and its inverse rounds twice, so a number at the limit may cross it.
        assert mine["grad_subnormal"] == pytest.approx(theirs["grad_subnormal"], abs=1e-3)
        assert {**mine, "grad_subnormal": 0} == {**theirs, "grad_subnormal": 0}
    (unclipped, *_), *_ = look(Fp32, TASK)
    assert unclipped["grad_subnormal"] == phased[0]["grad_subnormal"] > 0
    assert unclipped["grad_norm"] > 0
    assert "grad_norm" not in phased[0]  # the backend's own


def test_a_group_without_decay_loses_no_update_where_it_has_no_gradient():
    """Pixels at the border are always 0, and so are the gradients of their weights."""
    group = Group(match=("layer1.*",), weight_decay=0.0)
    seen, *_ = look(Fp32, replace(TASK, optimizer=Sgd(0.1, weight_decay=0.01, groups=(group,))))
    assert max(shares["lost_updates"] for shares in seen) < 0.01


def test_where_the_norm_is_infinite_clipped_gradients_say_nothing():
    class Overflows(InOnePiece):
        def clip(self):
            next(self.model.parameters()).grad[0, 0] = INF
            super().clip()

    (first, *_), *_ = look(Overflows, replace(TASK, clip_norm=1.0))
    assert not {"grad_zero", "grad_subnormal", "grad_nonfinite"} & set(first)


def test_a_backend_that_shows_no_gradients_leaves_the_columns_empty(tmp_path):
    class Silent(Fp32):
        def grads(self):
            return {}

    steps, _ = train(tmp_path / "0", make_backend=Silent, monitor={"every": 1})
    assert steps[[*MONITORED, "grad_norm"]].isna().all(axis=None)


@pytest.mark.parametrize("every", [0, 1.5, "often"])
def test_what_is_no_number_of_steps_is_named(every):
    with pytest.raises(InputError, match=f"monitor.every={every}: expected a whole number of at least 1, or null"):
        replan(PLAN, monitor={"every": every})
