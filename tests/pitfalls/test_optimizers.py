"""Adam's eps, beta2 and step counter in 16 bits."""

import math

import torch
from support.pitfalls import line, results
from torch import nn

from mpcompare.pitfalls.grid import gap, next_below, stored


def test_eps_is_0_in_fp16_and_the_step_infinite():
    assert results("adam_eps", "stored")[0] == 0.0
    fp16, bf16, fp32 = results("adam_eps", "a step, gradient 1e-5")
    assert fp16 == -math.inf
    assert abs(bf16 - 0.9) < 2.0**-8
    assert abs(fp32 - 0.9) < 1e-3
    assert "square of the gradient is 0 in fp16" in line("adam_eps", "a step, gradient 1e-5").why
    fp16, bf16, fp32 = results("adam_eps", "gradient 0")
    assert math.isnan(fp16)
    assert (bf16, fp32) == (1.0, 1.0)
    assert "0 / (0 + 0) is nan" in line("adam_eps", "gradient 0").why
    assert all(abs(value - 0.9) < 2.0**-8 for value in results("adam_eps", "fused"))


def test_beta2_is_1_in_bf16_and_v_stays():
    fp16, bf16, fp32 = results("beta2", "stored")
    assert (fp16, bf16) == (1 - 2.0**-10, 1.0)
    assert fp32 == float(torch.tensor(0.999))
    fp16, bf16, fp32 = results("beta2", "v = 1 after")
    assert bf16 == 1.0
    assert (1 - next_below(1.0, torch.bfloat16)) / 2 > 1 - 0.999  # the mechanism
    assert abs(fp32 / 0.999**10_000 - 1) < 1e-3
    assert 1.5 < fp16 / fp32 < 2.5
    assert "in bf16, 0.00195312; exact is 4.51733e-05" in line("beta2", "v = 1 after").why


def test_a_counter_stops_where_numbers_are_2_apart():
    fp16, bf16, fp32 = results("step_counter", "counter after")
    assert (fp16, bf16, fp32) == (2048.0, 256.0, 10_000.0)
    for dtype, stop in ((torch.float16, fp16), (torch.bfloat16, bf16)):
        assert (gap(stop, dtype), gap(next_below(stop, dtype), dtype)) == (2.0, 1.0)
        assert stored(stop, dtype) + 1 == stop
    assert "From 256 on bf16's numbers are 2 apart, and fp16's from 2048" in line("step_counter", "counter after").why
    corrections = results("step_counter", "1 - 0.999^step")
    assert corrections == tuple(1 - 0.999**steps for steps in (2048, 256, 10_000))
    assert f"{corrections[1]:.6g}" in line("step_counter", "1 - 0.999^step").why


def test_torch_counts_steps_in_fp32():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    assert optimizer.state[weight]["step"].dtype == torch.float32
