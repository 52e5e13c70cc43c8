"""Squares: they leave fp16 long before their mean's root does, in norms of gradients and of layers."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mpcompare.pitfalls.grid import smallest, stored
from mpcompare.pitfalls.pitfall import Line, in_formats, number, pitfall

BIG, SMALL = 300.0, 1e-4


@pitfall(
    "Does a mean of squares fit?",
    "Square and average in fp32 and round after the root, in RMSNorm and in an MSE alike.",
    "Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467",
)
def mean_of_squares() -> Iterator[Line]:
    def mean(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((4096,), value, dtype=dtype).square().mean()

    def root(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((4096,), value, dtype=dtype).float().square().mean().sqrt().to(dtype)

    largest, least = number(torch.finfo(torch.float16).max), number(smallest(torch.float16))
    for value, why in (
        (BIG, f"A square of {number(BIG**2)} is above {largest}, fp16's largest number."),
        (SMALL, f"A square of {number(SMALL**2)} is below half of {least}, fp16's smallest number."),
    ):
        yield Line(f"the mean of squares of {number(value)}", in_formats(partial(mean, value)), why)
    for value, why in (
        (BIG, "The mean may not fit, but its root is as large as the values."),
        (SMALL, "In fp32 the small squares are there, and the root is as large as the values."),
    ):
        yield Line(f"the root of the mean, in fp32, of {number(value)}", in_formats(partial(root, value)), why)


@pitfall(
    "Does a gradient's norm of 300 fit?",
    "Take norms in fp32, of unscaled gradients, as torch.nn.utils.clip_grad_norm_ does of fp32 ones.",
    "docs.pytorch.org, notes on numerical accuracy: extremal values",
)
def norm() -> Iterator[Line]:
    def gradient(dtype: torch.dtype) -> Tensor:
        return torch.full((9,), 100.0, dtype=dtype)

    def by_hand(dtype: torch.dtype) -> Tensor:
        return gradient(dtype).square().sum().sqrt()

    norms = in_formats(by_hand)
    factor = 1 / norms["fp16"]
    yield Line(
        "sqrt(sum(g * g)) of nine elements 100",
        norms,
        f"The sum of squares is {number(float(by_hand(torch.float64)) ** 2)}, above "
        f"{number(torch.finfo(torch.float16).max)}.",
    )
    yield Line(
        "an element, clipped with it to norm 1",
        in_formats(lambda dtype: gradient(dtype)[0] / by_hand(dtype)),
        f"A norm of {number(norms['fp16'])} makes the factor {number(factor)}: clipping takes the gradient away.",
    )
    yield Line(
        "torch.linalg.vector_norm of them",
        in_formats(lambda dtype: torch.linalg.vector_norm(gradient(dtype))),
        "torch sums the squares in fp32, and rounds the root.",
    )


@pitfall(
    "Does a layer norm in fp16 hold?",
    "Use torch's layer_norm, which autocast runs in fp32, or compute the statistics in fp32.",
    "Ba et al., Layer Normalization, arXiv 1607.06450; docs.pytorch.org, torch.amp: ops that autocast to float32",
)
def layer_norm() -> Iterator[Line]:
    def by_hand(x: Tensor, eps: float) -> Tensor:
        centred = x - x.mean()
        return centred / (centred.square().mean() + stored(eps, x.dtype)).sqrt()

    def wide(dtype: torch.dtype) -> Tensor:
        return torch.tensor([BIG, -BIG], dtype=dtype)

    variance = in_formats(lambda dtype: wide(dtype).square().mean())
    eps = in_formats(lambda dtype: stored(1e-8, dtype))
    yield Line(
        "by hand, of (300, -300): the first element",
        in_formats(lambda dtype: by_hand(wide(dtype), 1e-5)[0]),
        f"The variance in fp16 is {number(variance['fp16'])}, and a number divided by it is 0.",
    )
    yield Line(
        "torch's layer_norm of the same",
        in_formats(lambda dtype: F.layer_norm(wide(dtype), (2,))[0]),
        "torch computes mean and variance in fp32, whatever the dtype of the input.",
    )
    yield Line(
        "by hand, of equal elements, with eps = 1e-8",
        in_formats(lambda dtype: by_hand(torch.ones(2, dtype=dtype), 1e-8)[0]),
        f"This eps is {number(eps['fp16'])} in fp16, so that 0 is divided by {number(eps['fp16'])}.",
    )
