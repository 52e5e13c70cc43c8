"""The pass ``padding``: a step in which every number is 0, as in a row of padding.

A norm that sees such a row divides by the root of its eps alone. Where eps is left out, or is 0 in 16 bits, as 1e-12 is
in fp16, 0 / 0 is NaN. On rows that have a variance the same mistake is smaller than one rounding. With weights and
inputs of 0 each norm of the network sees a variance of 0, and nothing can overflow, since only the gradients of the
last bias are not 0. So whatever is finite in fp32 is finite in any format: no tolerance is needed.
"""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompare.tasks.batch import each
from mpcompare.tasks.draws import as_examined
from mpcompare.tasks.task import with_values
from mpcompare.verdict.examine.drive import Driver
from mpcompare.verdict.examine.exact_values import Problem
from mpcompare.verdict.examine.new_step import begun, starts_anew
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.padding import Padding

ROWS = 8  # of the first batch: they tell what is finite in fp32
DIVIDES = ("norm", "sqrt", "var", "std", "div", "reciprocal")  # parts of the names of operators that may divide by 0


def after_first(subject: Subject, driver: Driver) -> Padding | None:
    """Takes such a step with the first batch up to its gradients; None if the network divides by nothing, or if its
    loss at zeros is not finite in fp32. The driver's backend, which nobody needs any more, loads the weights of 0."""
    backend = driver.backend
    exact = subject.exact_values.once("padding", _exact_values)
    if not exact:
        return None
    backend.load_state_dict(starts_anew(backend, _of_zeros(subject.examined)))
    walk = begun(subject, backend, batch=[(_zero(x), y) for x, y in subject.first_batch])
    shown = backend.grads()
    finite = {name: bool(shown[name].isfinite().all()) for name in exact["finite"] if name in shown}
    return Padding(float(walk.loss), exact["loss"], finite)


def _exact_values(problem: Problem) -> dict[str, Any]:
    """Returns the loss of a few rows in fp32, and the names of the gradients that are finite; nothing where the network
    does not divide, cannot be called with zeros, or makes no finite loss of them."""
    network = _of_zeros(problem.network)
    x, y = problem.batch[0]
    try:
        with as_examined(x.device), torch.enable_grad():
            with _Divides() as divides:
                output = network(_zero(x[:ROWS]))
            loss = problem.loss_fn(output, y[:ROWS])
            loss.backward()
    except Exception:  # a network may check its inputs
        return {}
    if not divides.found or not loss.isfinite():
        return {}
    finite = [n for n, p in network.named_parameters() if p.grad is not None and bool(p.grad.isfinite().all())]
    return {"loss": loss.item(), "finite": finite}


def _zero(x: Any) -> Any:
    """Returns inputs of 0. Whole numbers are no quantities, and stay as they are."""
    return each(lambda t: torch.zeros_like(t) if t.is_floating_point() else t, x)


def _of_zeros(network: nn.Module) -> nn.Module:
    """Returns a copy of a network with weights of 0."""
    return with_values(network, {name: torch.zeros_like(p) for name, p in network.named_parameters()}, {})


class _Divides(TorchDispatchMode):
    """Tells whether an operator that may divide by 0 is called while it is entered."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= any(part in func.name() for part in DIVIDES)
        return func(*args, **(kwargs or {}))
