"""The update after training, on backends that are right."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.backends import BACKENDS
from support.correct import WholeStep
from support.judging import dataset_of, examined
from support.marks import diagonal
from support.tasks import make_task

from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.verdict.examine import numerics

TASK = make_task(samples=32 * 12)
DATA = dataset_of(TASK)
OPTIMIZERS = [Sgd(0.05), Sgd(0.05, 0.9, True, 0.01), Adam(1e-3, weight_decay=0.1), AdamW(1e-3, (0.0, 0.999))]


def found(name, task, precision="bf16", backend=None):
    return examined(name, backend or BACKENDS[name], task, DATA, precision, steps=5).findings.trained


def worst(trained):
    of_moments = [excess for tensors in trained.moments.values() for excess in tensors.values()]
    return max([e.excess for e in trained.drive.updates[0].values()] + of_moments)


@diagonal(3, name=["amp", "scratch", "fused", "master_weights", "fp32"], optimizer=OPTIMIZERS)
def test_a_right_update_and_what_it_leaves_are_within_fp32_roundings(name, optimizer):
    trained = found(name, replace(TASK, optimizer=optimizer, clip_norm=0.05), "fp32" if name == "fp32" else "bf16")
    kinds = set(optimizer.initial_state(torch.zeros(()))) - {"step"}
    assert set(trained.moments) == kinds
    assert all(set(tensors) == set(trained.drive.updates[0]) for tensors in trained.moments.values())
    assert 0 < worst(trained) <= 1
    assert not trained.drive.known_mistakes
    assert {(c.count, c.should_count) for c in trained.counts.values()} == ({(6, 6)} if len(kinds) == 2 else set())


def test_a_step_in_one_piece_shows_its_clipped_gradients():
    trained = found("whole", replace(TASK, clip_norm=0.05), backend=WholeStep)
    (clip,) = trained.drive.clips
    assert clip.should_norm is None
    assert clip.norm > 0.05 > clip.norm_after * (1 - 1e-5)
    assert worst(trained) <= 1


def test_some_elements_of_a_large_tensor_are_enough():
    with mock.patch.object(numerics, "SPREAD", 100):
        trained = found("scratch", replace(TASK, optimizer=OPTIMIZERS[1], clip_norm=0.05))
    assert 0 < worst(trained) <= 1
    (clip,) = trained.drive.clips
    assert all(e.factor == pytest.approx(clip.should_factor, rel=1e-6) for e in clip.factors.values())


def test_elements_are_spread_over_all_columns_and_are_the_same_in_every_layout():
    t = torch.arange(64.0 * 64).reshape(64, 64)
    with mock.patch.object(numerics, "SPREAD", 256):
        some = numerics.spread(t)
        assert torch.equal(numerics.spread(t.t().contiguous().t()), some)
    assert 200 <= len(some) <= 256
    assert len({int(e) % 64 for e in some}) == 64
    assert torch.equal(numerics.spread(t), t.flatten())
    kernels = torch.arange(9).repeat(64)
    assert len(set(numerics.spread(kernels.reshape(8, 8, 3, 3), 200).tolist())) == 9
