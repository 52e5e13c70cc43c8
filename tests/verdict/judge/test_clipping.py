"""The error of a norm in fp32."""

import math

import torch

from mpcompare.verdict.findings import Clip
from mpcompare.verdict.judge.clipping import norm_error


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
