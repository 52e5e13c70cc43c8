"""The state of Adam in 16 bits: its eps, its beta2, its count of steps."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from mpcompare.pitfalls.grid import gap, next_below, smallest, stored
from mpcompare.pitfalls.pitfall import Line, in_formats, number, pitfall
from mpcompare.pitfalls.sums import added

ADAM = "Kingma and Ba, Adam, arXiv 1412.6980"
EPS, BETA2, STEPS = 1e-8, 0.999, 10_000


def _after_a_step(gradient: float, dtype: torch.dtype, fused: bool = False) -> Tensor:
    """Returns a weight of 1 after one step of torch's Adam with lr = 0.1."""
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    weight.grad = torch.full_like(weight, gradient)
    torch.optim.Adam([weight], lr=0.1, eps=EPS, fused=fused).step()
    return weight.detach()


@pitfall(
    "Does Adam's eps = 1e-8 protect?",
    "Keep moments and master weights in fp32, and compute the step in fp32.",
    f"{ADAM}; docs.pytorch.org, torch.optim.Adam",
)
def adam_eps() -> Iterator[Line]:
    eps = in_formats(lambda dtype: stored(EPS, dtype))
    square = in_formats(lambda dtype: stored(1e-5, dtype).square())
    half = smallest(torch.float16) / 2
    yield Line(
        "eps = 1e-8 is stored as",
        eps,
        f"Half of fp16's smallest number is {number(half)}; less is rounded to {number(eps['fp16'])}.",
    )
    yield Line(
        "a weight of 1 after a step, gradient 1e-5",
        in_formats(lambda dtype: _after_a_step(1e-5, dtype)),
        f"The square of the gradient is {number(square['fp16'])} in fp16 too, and the step is m / (0 + 0).",
    )
    yield Line(
        "a weight of 1 after a step, gradient 0",
        in_formats(lambda dtype: _after_a_step(0.0, dtype)),
        f"m is 0 as well, and 0 / (0 + {number(eps['fp16'])}) is nan; with an eps of {number(eps['bf16'])} it is 0.",
    )
    yield Line(
        "gradient 1e-5, with torch's fused=True",
        in_formats(lambda dtype: _after_a_step(1e-5, dtype, fused=True)),
        "The fused step computes in fp32, and rounds the weight and the moments that it stores.",
    )


@pitfall("Does beta2 = 0.999 forget?", "Keep the second moment in fp32, or round it stochastically.", ADAM)
def beta2() -> Iterator[Line]:
    def decayed(dtype: torch.dtype) -> Tensor:
        v = stored(1.0, dtype)
        for _ in range(STEPS):
            v *= BETA2
        return v

    below = 1 - next_below(1.0, torch.bfloat16)
    final = in_formats(decayed)
    yield Line(
        "beta2 = 0.999 is stored as",
        in_formats(lambda dtype: stored(BETA2, dtype)),
        f"bf16's next number below 1 is {number(1 - below)}, and 1 is nearer.",
    )
    yield Line(
        "v = 1 after 10,000 steps of v = 0.999 v",
        final,
        f"A step takes {number(1 - BETA2)} of v, less than half the gap below 1 in bf16, {number(below / 2)}; "
        f"exact is {number(BETA2**STEPS)}.",
    )


@pitfall(
    "How far does a step counter go?",
    "Count in an integer or in fp32, as torch.optim does, and cast no counter to 16 bits.",
    f"{ADAM}, section 3: bias correction",
)
def step_counter() -> Iterator[Line]:
    steps = in_formats(partial(added, 0.0, 1.0, STEPS))
    gaps = {name: gap(steps[name], dtype) for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))}
    yield Line(
        "a counter after 10,000 times + 1",
        steps,
        f"From {number(steps['bf16'])} on bf16's numbers are {number(gaps['bf16'])} apart, and fp16's from "
        f"{number(steps['fp16'])} on: + 1 is halfway, and is rounded back.",
    )
    yield Line(
        "Adam's 1 - 0.999^step with that counter",
        {name: 1 - BETA2**step for name, step in steps.items()},
        f"v is divided by {number(1 - BETA2 ** steps['bf16'])} for ever in bf16, where it should be by "
        f"{number(1 - BETA2**STEPS)}.",
    )
