"""The precision that gradients show, whatever was asked for."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpcompare.dtypes import torch_dtype
from mpcompare.precision import PRECISIONS, Precision
from mpcompare.verdict.examine.errors import gradient_errors
from mpcompare.verdict.examine.oracle import oracle
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.errors import Errors, relative_error

TRIED = ("fp32", "fp16", "bf16")


def effective_precision(subject: Subject, grads: Mapping[str, Tensor], errors: Errors) -> str:
    """Returns the precision asked for, unless another one's oracle is far closer, and every tensor is closer to it or
    within one rounding of it: below a unit next to 0 that turned on or off any may be.

    Args:
        errors: those of the gradients compared with the oracle of the precision asked for.
    """
    asked = subject.precision
    error = _largest(errors)
    if not asked.is_16_bit or error <= 2 * asked.unit_roundoff:
        return asked.name  # others need not be tried

    def errors_beside(other: Precision, dtype: torch.dtype) -> Errors:
        return gradient_errors(grads, oracle(subject.exact_values, other, dtype).grads)

    def fits(other: Precision, there: Errors) -> bool:
        u = other.unit_roundoff
        each = all(relative_error(there[name]) <= max(relative_error(errors[name]), u) for name in errors)
        return each and _largest(there) < min(error / 4, 16 * u)

    found = {}
    for other in (PRECISIONS[name] for name in TRIED):
        if torch_dtype(other.storage) is torch_dtype(asked.storage):
            continue
        rough = errors_beside(other, torch.float32)  # in fp32 arithmetic it costs a quarter, and rules most of them out
        if fits(other, rough) and fits(other, there := errors_beside(other, torch.float64)):
            found[other.name] = _largest(there)
        elif (asked.name, other.name) == ("bf16", "fp32") and _largest(rough) >= error:
            break  # fp16's oracle lies between the two, so it is not that one either
    return min(found, key=found.__getitem__, default=asked.name)


def _largest(errors: Errors) -> float:
    """Returns the largest relative error of a tensor."""
    return max(map(relative_error, errors.values()))
