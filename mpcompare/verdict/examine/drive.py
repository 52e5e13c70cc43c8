"""A new backend, driven step by step: the passes ``first``, ``overflow``, ``infinite input`` and ``aged``.

After each phase that changes something, the backend is asked for its gradients and its weights. The gradients of the
pass ``first`` are compared with the oracle's, those of later passes with a new backend's; the updates with the
optimizer's in fp32 arithmetic; the loss scale with its policy.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpcompare.clipping import factor_of_norm
from mpcompare.contract import Batches, State, Walk, promises_of
from mpcompare.dtypes import torch_dtype
from mpcompare.instruments import heap
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, load_state
from mpcompare.precision import FORMATS
from mpcompare.stored import Stored
from mpcompare.tasks.optimizers import IN_FP32, Coarse, Optimizer
from mpcompare.tasks.task import Params, Task, buffers_of, with_values
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.draws import beside_the_oracle
from mpcompare.verdict.examine.effective_precision import effective_precision
from mpcompare.verdict.examine.errors import (
    FROM_THE_START,
    Remembered,
    gradient_errors,
    micro_batches,
    update_errors,
)
from mpcompare.verdict.examine.group_mistakes import known_mistakes
from mpcompare.verdict.examine.idle import idle
from mpcompare.verdict.examine.idle import moved as moved_ones
from mpcompare.verdict.examine.new_step import new_step
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.seen import Seen, all_finite, moved
from mpcompare.verdict.examine.subject import Subject, promised_scaling, promised_task
from mpcompare.verdict.examine.updates import Update
from mpcompare.verdict.findings import (
    Clip,
    Drive,
    Errors,
    FiniteStep,
    FirstUpdate,
    Gradients,
    NextScale,
    Step,
    UpdateError,
)

RETRIES = 40  # a scale of 2^24 that halves gets everywhere in fewer


def drive(
    subject: Subject,
    scaling: LossScale,
    start: Batches,
    follow: Sequence[Batches],
    exact: Exact,
    with_oracle: bool = False,
) -> "Driver":
    """Lets a new backend take the batch ``start`` until its gradients are finite, then the batches ``follow``.

    Args:
        scaling: the loss scale of the backend.
        exact: the oracle's step on ``start``.
        with_oracle: whether gradients and buffers are compared with the oracle's, and not with a new backend's.
    """
    driver = Driver(subject, scaling, start, exact, with_oracle)
    for _ in range(RETRIES):
        if driver.take(start) or not isinstance(scaling, DynamicLossScale):
            break
    for batch in follow:
        driver.take(batch)
    return driver


def rows_of(tensors: Mapping[str, Tensor]) -> Params:
    """Returns the tensors row by row: those that lie so are no copies."""
    return {name: t.detach().contiguous() for name, t in tensors.items()}


def beside(loss: float, grads: Mapping[str, Tensor], exact: Exact) -> Gradients:
    """Returns loss and gradients beside the oracle's; ``grads`` is empty where none are shown."""
    of_batches = {name: g for name, g in grads.items() if any(name in share for share in exact.shares)}
    sketches = numerics.sketch(of_batches)
    return Gradients(
        loss=loss,
        exact_loss=exact.loss,
        loss_noise=exact.loss_noise,
        gradients=gradient_errors(grads, exact.grads) if grads else {},
        micro_batches=micro_batches(sketches, exact.shares, exact.weights) if sketches else None,
        of_tensors={name: micro_batches({name: s}, exact.shares, exact.weights) for name, s in sketches.items()},
    )


class Driver:
    """Takes steps with a new backend, and writes down each.

    Attributes:
        backend: the one that is driven.
        scaling: the loss scale as its policy has it after these steps.
        draws_alike: whether each step of the first batch drew the random numbers of the oracle's.
    """

    def __init__(
        self, subject: Subject, scaling: LossScale, start: Batches, exact: Exact, with_oracle: bool = False
    ) -> None:
        self.subject, self.start, self.exact, self.with_oracle = subject, start, exact, with_oracle
        self.backend = subject.make_backend(subject.examined, scaling)
        self.promises = promises = promises_of(self.backend)
        self.task = promised_task(subject.task, promises)
        self.asked, self.scaling = copy.deepcopy(scaling), promised_scaling(scaling, promises)
        self.trained_scale = promised_scaling(subject.scaling, promises).scale
        coarse = Coarse(promises.coarse_weights, promises.coarse_moments) if promises.coarse else IN_FP32
        self.replay = subject.task.optimizer.replay(coarse)
        self.checks = promises.skips_without_scale or not isinstance(scaling, NoLossScale)
        self.rates = subject.task.new_rates()
        self.compute_dtype = torch_dtype(subject.precision.storage)
        self.loaded, self.counted = False, set[str]()
        self.remembered = FROM_THE_START
        self.early: list[str] = []
        self.taken: list[Step] = []
        self.updates: list[Update] = []
        self.update_errors: list[dict[str, UpdateError]] = []
        self.clips: list[Clip] = []
        self.idle: list[dict[str, bool]] = []
        self.next_scale: NextScale | None = None
        self.first_finite: tuple[Seen, Batches] | None = None
        self.first_update: dict[str, FirstUpdate] = {}
        self.first_buffers: tuple[Seen, Mapping[str, Tensor]] | None = None  # with those after the step
        self.draws_alike = True

    def load(self, state: State) -> None:
        """Loads a state of the backend's own, whose parameters are the initial ones, before the first step."""
        self.backend.load_state_dict(state)
        self.loaded, kinds = True, state["optimizer"]
        for scaling in (self.scaling, self.asked):
            load_state(scaling, state["loss_scale"])
        self.counted = set(kinds.get("step", {}))
        counts = [int(count) for count in kinds.get("step", {}).values()]
        tensors = {kind: tensors for kind, tensors in kinds.items() if kind != "step"}
        self.remembered = Remembered(tensors, max(counts, default=0), at_once=True)
        for t in (t for of_kind in tensors.values() for t in of_kind.values()):
            heap.forget(t)  # the backend has read it

    def take(self, batch: Batches) -> bool:
        """Takes a step; returns whether its gradients were finite."""
        heap.trim()  # what is compared after one step, and what the next one needs, are of other sizes
        taken = self._step(batch)
        finite = self._finite_gradients(taken)
        self.draws_alike &= taken.draws_alike or batch is not self.start
        self._write_step(taken, finite)
        kept = replace(taken, after={})  # the backend's own would outlive it
        at_first = len(self.taken) == 1 and taken.draws_alike
        if self.exact.buffers and at_first:  # skipped or not: its forward is that of the oracle
            self.first_buffers = kept, Stored(self.backend.buffers())
        if not self.updates and taken.skipped and not self.loaded:
            self.early = early(self.backend.state_dict()["optimizer"], self.task.optimizer)
        self.scaling.update(not finite)
        self.asked.update(not finite)
        self.rates.count(self.checks and not finite)
        self.next_scale = NextScale(float(self.backend.loss_scale()), self.scaling.scale)
        if finite and not taken.skipped:
            self._write_update(self._without_idle(taken, batch))
        if finite and self.first_finite is None:
            self.first_finite = kept, batch
            if self.with_oracle and taken.draws_alike:  # before the next step changes the weights
                self.first_update = _first_update(self.task, taken, self.exact.grads)
        return finite

    def one_more(self, batch: Batches) -> Drive:
        """Takes one more step, of which a drive of its own tells whether it was skipped."""
        self.take(batch)
        return Drive(self.taken[-1:], [], [], [], self.next_scale)

    def result(self) -> Drive:
        """Returns everything that was written down; of updates that are wrong, the known mistakes that make them. The
        backend is freed, but for that of the pass ``first``."""
        wrong = any(not e.excess <= 1 for update in self.update_errors for e in update.values())
        short, coarse = self.promises.moments != "fp32", self.promises.coarse
        digits_of_state = digits(self.backend.state_dict()["optimizer"]) if wrong or short else {}
        finite, buffers = self._of_oracle() if self.with_oracle else self._of_new_backend()
        return Drive(
            steps=list(self.taken),
            updates=list(self.update_errors),
            rates=[update.lr for update in self.updates],
            clips=list(self.clips),
            next_scale=self.next_scale,
            finite=finite,
            buffers=buffers,
            # Bounds of coarse weights are so wide that mistakes fit into them.
            known_mistakes=known_mistakes(self.task, self.updates, self.compute_dtype) if wrong and not coarse else {},
            digits=digits_of_state,
            early=self.early,
            idle=list(self.idle) if any(self.idle) else [],
        )

    def _step(self, batch: Batches) -> Seen:
        backend, lr = self.backend, float(self.rates.now)
        before, scale = Stored(backend.master_params()), float(backend.loss_scale())
        buffers = Stored(backend.buffers())
        walk = Walk(backend, batch, lr)
        draws_alike = beside_the_oracle(self.exact, walk)
        walk.through("unscale")
        loss, grads = float(walk.loss), Stored(backend.grads())
        several = self.task.accumulate > 1 and not walk.in_one_piece
        moved_early = several and moved(before, backend.master_params())
        walk.through("clip")
        clipped = grads if walk.in_one_piece or self.task.clip_norm is None else Stored(backend.grads())
        walk.through("step")
        after, skipped = rows_of(backend.master_params()), bool(backend.skipped)
        walk.finish()
        return Seen(
            lr, loss, grads, clipped, before, after, scale, skipped, moved_early, walk.in_one_piece, draws_alike,
            said_norm(backend), buffers,
        )  # fmt: skip

    def _finite_gradients(self, taken: Seen) -> bool:
        """Whether the gradients of a step are finite. Of those that are not shown, as in a skipped step, the loss tells
        where it is inf or NaN, and else the backend, where its loss is scaled."""
        if taken.grads:
            return all_finite(taken.grads)
        return math.isfinite(taken.loss) and not (self.checks and taken.skipped)

    def _without_idle(self, taken: Seen, batch: Batches) -> Seen:
        """Writes down whether parameters without a gradient moved, and returns the step without their gradients."""
        names = idle(self.subject.examined, self.task.loss_fn, batch, taken.grads, taken.before)
        self.idle.append(moved_ones(names, taken.before, taken.after))
        if not names:
            return taken
        shown = {name: g for name, g in taken.grads.items() if name not in names}
        return replace(taken, grads=shown, clipped={name: taken.clipped[name] for name in shown})

    def _write_step(self, taken: Seen, finite: bool) -> None:
        asked = None if self.asked.scale == self.scaling.scale else self.asked.scale
        self.taken.append(taken.step(finite, self.checks, self.scaling.scale, asked))

    def _write_update(self, taken: Seen) -> None:
        weights = self.promises.weights
        short = self.compute_dtype if weights == "fp32" else torch_dtype(FORMATS[weights])
        change = taken.change(self.remembered)
        self.update_errors.append(update_errors(self.replay, change, short, self.promises.coarse_weights))
        self.updates.append(taken.update(int(self.rates.updates) - 1, len(self.taken) - 1, self.remembered))
        self.remembered = FROM_THE_START
        if taken.grads and self.task.clip_norm is not None:
            self.clips.append(taken.clip(self.task.clip_norm, self.task.clip_norm_type))

    def _of_oracle(self) -> tuple[FiniteStep | None, Errors]:
        """Returns the first finite step, and the buffers after the first step, compared with the oracle's."""
        buffers = self._buffers(self.exact.buffers)
        if self.first_finite is None:
            return None, buffers
        taken, _ = self.first_finite
        grads = taken.grads if taken.draws_alike else {}  # those of other masks are no errors
        if taken.in_one_piece and (factor := own_factor(taken.norm, self.task)) < 1:
            grads = {name: g / factor for name, g in grads.items()}
        gradients = beside(taken.loss, grads, self.exact)
        finite = FiniteStep(
            **vars(gradients),
            first_update=self.first_update,
            subnormal=self.exact.subnormal(self.trained_scale),
            effective_precision=(
                effective_precision(self.subject, self.start, grads, gradients.gradients) if grads else None
            ),
        )
        return finite, buffers

    def _of_new_backend(self) -> tuple[FiniteStep | None, Errors]:
        """Returns the same compared with a new backend at the same weights."""
        del self.backend
        heap.trim()
        finite, buffers, again = None, {}, None
        if self.first_finite is not None:
            taken, batch = self.first_finite
            again = self._again(taken, batch)
            grads = taken.grads if taken.draws_alike else {}
            subnormal = self.exact.subnormal(self.trained_scale)
            finite = FiniteStep(**vars(beside(taken.loss, grads, again)), subnormal=subnormal)
        if self.first_buffers is not None:  # forward does not depend on the loss scale; here nothing overflows
            taken, _ = self.first_buffers
            if again is None or self.first_finite is None or self.first_finite[0] is not taken:
                scale = self.first_finite[0].scale if self.first_finite else taken.scale
                again = self._again(replace(taken, scale=scale), self.start)
            buffers = self._buffers(again.buffers)
        return finite, buffers

    def _again(self, taken: Seen, batch: Batches) -> Exact:
        """Returns a step as a new backend takes it."""
        network = with_values(self.subject.examined, taken.before, taken.buffers)
        return new_step(self.subject, network, taken.scale, batch, taken.lr)

    def _buffers(self, expected: Mapping[str, Tensor]) -> Errors:
        """Returns the errors of the buffers after the first step; empty where there are none."""
        if self.first_buffers is None:
            return {}
        taken, found = self.first_buffers
        restored = taken.skipped and self.promises.restores_buffers
        expected = buffers_of(self.subject.examined) if restored else expected
        return gradient_errors(found, {name: b.double() for name, b in expected.items()})


def said_norm(backend: Any) -> float:
    """Returns the norm that a backend says its gradients had; NaN where it says none."""
    return math.nan if backend.grad_norm is None else float(backend.grad_norm)


def own_factor(norm: float, task: Task) -> float:
    """Returns the factor by which a backend multiplied its gradients when it clipped them, from the norm that it says
    they had."""
    return factor_of_norm(norm, task.clip_norm) if task.clip_norm is not None and norm >= 0 else 1.0


def digits(state: Mapping[str, Params]) -> dict[str, float]:
    """Returns, of each kind of what the optimizer remembers, the share of nonzero numbers that have no more digits than
    fp16 or bf16."""
    shares = {}
    for kind, tensors in _moments(state).items():
        values = torch.cat([t.detach().flatten() for t in tensors.values() if t.dim()] or [torch.zeros(0)])
        if len(values := values[values != 0]):
            exact = [(values.to(dtype).float() == values).double().mean() for dtype in (torch.float16, torch.bfloat16)]
            shares[kind] = float(max(exact))
    return shares


def early(state: Mapping[str, Params], optimizer: Optimizer) -> list[str]:
    """Returns the kinds of the optimizer's tensors that hold another number than they should before the first update:
    0, but for a few optimizers."""
    first = optimizer.initial_state(torch.zeros(()))
    at_first = {kind: float(first[kind]) if kind in first else 0.0 for kind in state}
    return [
        kind
        for kind, tensors in _moments(state).items()
        if any(bool((t != at_first[kind]).any()) for t in tensors.values())
    ]


def _moments(state: Mapping[str, Params]) -> dict[str, Params]:
    """Returns everything that the optimizer remembers, but for the count of updates, which is a whole number."""
    return {kind: tensors for kind, tensors in state.items() if kind != "step"}


def _first_update(task: Task, taken: Seen, exact: Mapping[str, Tensor]) -> dict[str, FirstUpdate]:
    """Returns the change of each tensor beside the one that the oracle's gradients make."""
    factor = numerics.clip_factor(exact, task.clip_norm, task.clip_norm_type)
    updates = {}
    for name in exact:
        largest, squares = [], []
        for w, new, g in numerics.chunks(taken.before[name], taken.after[name], exact[name]):
            w = w.double()
            step, _ = task.optimizer.replay().step(name, g * factor, w, taken.lr)
            decay, _ = task.optimizer.replay().step(name, torch.zeros_like(g), w, taken.lr)
            largest.append(step.abs().max())
            pieces = (new.double() - w - step, step, w, step - decay, g)
            squares.append(torch.stack([torch.dot(piece, piece) for piece in pieces]))
        error, norm, weights, gain, grad = torch.stack(squares).sum(dim=0).sqrt().tolist()
        updates[name] = FirstUpdate(
            error, norm, torch.stack(largest).max().item(), weights, gain / grad if grad else 0.0
        )
    return updates
