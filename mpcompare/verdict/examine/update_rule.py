"""The rule that makes updates of gradients: the optimizer's, as a backend promises to follow it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mpcompare.clipping import factor_of_norm
from mpcompare.dtypes import torch_dtype
from mpcompare.precision import FORMATS, Precision
from mpcompare.promises import Promises
from mpcompare.tasks.optimizers import IN_FP32, Coarse, Optimizer
from mpcompare.tasks.task import Params, Task
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import update_errors
from mpcompare.verdict.examine.known_mistakes import known_mistakes
from mpcompare.verdict.examine.seen import Seen
from mpcompare.verdict.judge.drive import KnownMistake, UpdateError


class UpdateRule:
    """The updates that follow from gradients.

    Attributes:
        task: the task, with the clipping that the backend promises if the task clips nothing.
        replay: the optimizer in float64, in the arithmetic that the backend promises.
    """

    def __init__(self, task: Task, precision: Precision, promises: Promises) -> None:
        if task.clip_norm is None and promises.clip_norm is not None:
            task = replace(task, clip_norm=promises.clip_norm)
        self.promises, self.task = promises, task
        coarse = Coarse(promises.coarse_weights, promises.coarse_moments) if promises.coarse else IN_FP32
        self.replay = task.optimizer.replay(coarse)
        self.compute = torch_dtype(precision.storage)
        self.short = self.compute if promises.weights == "fp32" else torch_dtype(FORMATS[promises.weights])

    def clip_factor(self, norm: float) -> float:
        """Returns the factor by which a backend multiplied its gradients when it clipped them, from the norm that the
        backend says they had."""
        return factor_of_norm(norm, self.task.clip_norm) if self.task.clip_norm is not None and norm >= 0 else 1.0

    def errors(self, seen: Seen) -> dict[str, UpdateError]:
        """Returns how far the next update is from the rule's."""
        return update_errors(self.replay, seen, self.short, self.promises.coarse_weights)

    def mistakes(
        self, updates: Sequence[Seen], errors: Sequence[Mapping[str, UpdateError]]
    ) -> dict[str, KnownMistake] | None:
        """Returns the known mistakes that updates with these errors are compared with; None where all updates are
        right. The bounds of coarse weights are so wide that mistakes fit into them."""
        if all(e.excess <= 1 for update in errors for e in update.values()):
            return None
        return {} if self.promises.coarse else known_mistakes(self.task, updates, self.compute)


def digits(state: Mapping[str, Params]) -> dict[str, float]:
    """Returns, for each kind of the optimizer's tensors, the share of nonzero numbers that have no more digits than
    fp16 or bf16."""
    shares = {}
    for kind, tensors in _moments(state).items():
        values = torch.cat([t.detach().flatten() for t in tensors.values() if t.dim()] or [torch.zeros(0)])
        if len(values := values[values != 0]):
            shares[kind] = numerics.short_share(values)
    return shares


def early(state: Mapping[str, Params], optimizer: Optimizer) -> list[str]:
    """Returns the kinds of the optimizer's tensors that hold another number than they should before the first update.
    The right number is 0, except in a few optimizers."""
    first = optimizer.initial_state(torch.zeros(()))
    at_first = {kind: float(first[kind]) if kind in first else 0.0 for kind in state}
    return [
        kind
        for kind, tensors in _moments(state).items()
        if any(bool((t != at_first[kind]).any()) for t in tensors.values())
    ]


def _moments(state: Mapping[str, Params]) -> dict[str, Params]:
    """Returns everything that the optimizer remembers, without the count of updates, which is a whole number."""
    return {kind: tensors for kind, tensors in state.items() if kind != "step"}
