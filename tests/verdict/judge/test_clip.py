"""The error of a norm in fp32, and gradients that clipping made too small."""

import math
from types import SimpleNamespace

import torch

from mpcompare.verdict.judge.clip import clip_mistake, norm_error, scales
from mpcompare.verdict.judge.drive import Clip, Gradients
from mpcompare.verdict.judge.errors import GradientError


def clip(elements, norm_type):
    return Clip(norm=1.0, norm_after=1.0, clip_norm=1.0, norm_type=norm_type, elements=elements)


def test_a_norm_in_fp32_is_within_its_error():
    for elements in (10, 10_000, 10_000_000):
        g = torch.rand(elements, generator=torch.Generator().manual_seed(0)) + 0.5
        exact = g.double().norm().item()
        for norm_type in (2.0, math.inf):
            error, tiny = norm_error(clip(elements, norm_type))
            true = exact if norm_type == 2 else g.double().max().item()
            assert abs(torch.linalg.vector_norm(g, norm_type).item() - true) <= error * true + tiny
        squares = g.square().cumsum(0, dtype=torch.float32)[-1] if elements <= 10_000 else g.square().sum()
        error, _ = norm_error(clip(elements, 2.0))
        assert abs(squares.sqrt().item() - exact) <= error * exact


def clause(factor, norm):
    run = SimpleNamespace(findings=SimpleNamespace(recipe=SimpleNamespace(clip_norm=None)))
    step = Gradients(1.0, 1.0, 0.0, {"a": GradientError(0.0, norm, norm, factor, 0.0, 0.0, 100)})
    return clip_mistake(factor, run, SimpleNamespace(steps=[]), step)


def test_of_a_usual_norm_and_a_power_of_two_the_nearer_one_is_the_reason():
    assert clause(0.3, 3.334) == ": their norm is 1, to which nobody asked to clip them"
    assert clause(0.5001, 1.9996) == ": their norm is 1, to which nobody asked to clip them"
    assert clause(0.5, 1.99) == ""  # halved, and a norm of 0.995
    assert clause(0.3, 3.0) == ""
    assert clause(2.0, 0.5) == ""


def test_nobody_divides_by_a_loss_scale_of_0():
    assert scales(SimpleNamespace(steps=[SimpleNamespace(loss_scale=s) for s in (0.0, 8.0, 1.0, 2.0, 8.0)])) == [
        2.0,
        8.0,
    ]
