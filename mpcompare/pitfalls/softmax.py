"""Softmax and cross-entropy: exponentials above the largest number, and probabilities below the smallest."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mpcompare.pitfalls.grid import smallest
from mpcompare.pitfalls.pitfall import Line, in_formats, number, pitfall

LOGIT, APART, CLASSES = 12.0, 20.0, 70_000


def _naive(logits: Tensor) -> Tensor:
    exponentials = logits.exp()
    return exponentials / exponentials.sum()


@pitfall(
    "Does a softmax in fp16 hold?",
    "Take logits to fp32 before softmax and loss, and use log_softmax or cross_entropy.",
    "docs.pytorch.org, torch.amp: ops that autocast to float32; Blanchard et al., arXiv 1909.03469",
)
def softmax() -> Iterator[Line]:
    exponential = in_formats(lambda dtype: torch.tensor(LOGIT, dtype=dtype).exp())
    sums = in_formats(lambda dtype: torch.zeros(CLASSES, dtype=dtype).exp().sum())
    apart = partial(torch.tensor, [APART, 0.0])
    probability = in_formats(lambda dtype: F.softmax(apart(dtype=dtype), 0)[1])
    yield Line(
        "exp(x) / sum(exp(x)) of (12, 0): the first",
        in_formats(lambda dtype: _naive(torch.tensor([LOGIT, 0.0], dtype=dtype))[0]),
        f"exp({number(LOGIT)}) is {number(exponential['fp32'])} in fp32 and {number(exponential['fp16'])} in fp16, "
        "and inf / inf is nan.",
    )
    yield Line(
        "torch.softmax of (12, 0): the first",
        in_formats(lambda dtype: F.softmax(torch.tensor([LOGIT, 0.0], dtype=dtype), 0)[0]),
        "torch subtracts the largest logit before exp, and computes in fp32.",
    )
    yield Line(
        "the same of 70,000 equal logits: their sum",
        in_formats(lambda dtype: _naive(torch.zeros(CLASSES, dtype=dtype)).double().sum()),
        f"Even exponentials of 1 sum to {number(sums['fp16'])} in fp16, and divided by that they are 0.",
    )
    yield Line(
        "-log(softmax(x)), x 20 below the top",
        in_formats(lambda dtype: -F.softmax(apart(dtype=dtype), 0)[1].log()),
        f"Its probability is {number(probability['fp32'])}; in fp16, whose smallest number is "
        f"{number(smallest(torch.float16))}, it is {number(probability['fp16'])}.",
    )
    yield Line(
        "-log_softmax(x) of the same, as in torch",
        in_formats(lambda dtype: -F.log_softmax(apart(dtype=dtype), 0)[1]),
        "The logarithm is taken without the probability: x - max - log(sum(exp(x - max))).",
    )
