"""A new backend, driven step by step: the passes ``first``, ``overflow``, ``infinite input`` and ``aged``.

After each phase that changes something, the backend is asked for its gradients and its weights. The gradients of the
pass ``first`` are compared with the oracle's, and the gradients of later passes with a new backend's. The updates are
compared with the optimizer's in fp32 arithmetic, in some elements of each tensor, and the loss scale with its policy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from mpcompare.contract import Batches, State, Walk
from mpcompare.instruments import heap
from mpcompare.loss_scale import DynamicLossScale, LossScale
from mpcompare.stored import Stored
from mpcompare.tasks.task import buffers_of, with_values
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import clip_errors, gradient_errors
from mpcompare.verdict.examine.idle import idle
from mpcompare.verdict.examine.idle import moved as moved_ones
from mpcompare.verdict.examine.loss_scale import ExpectedScale, promised_scaling
from mpcompare.verdict.examine.masks import forward_as_the_oracle
from mpcompare.verdict.examine.new_step import compared, effective_precision, new_step
from mpcompare.verdict.examine.oracle import Exact
from mpcompare.verdict.examine.seen import FROM_THE_START, Remembered, Seen, all_finite, moved, said_norm
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.examine.update_rule import digits, early
from mpcompare.verdict.judge.drive import Drive, Gradients, NextScale
from mpcompare.verdict.judge.errors import Errors
from mpcompare.verdict.judge.replayed import Layers

RETRIES = 40  # a scale of 2^24 that halves gets everywhere in fewer


class Driver:
    """Takes steps with a new backend, and writes down each.

    Attributes:
        backend: the backend that is driven.
        policy: the backend's loss scale after these steps.
        found: what was written down.
    """

    def __init__(
        self, subject: Subject, scaling: LossScale, with_oracle: bool = False, new: Exact | None = None
    ) -> None:
        """If ``with_oracle``, gradients and buffers are compared with the oracle's, and else with a new backend's. Its
        first step is ``new``, where somebody has taken that step before."""
        self.subject, self.with_oracle, self.new = subject, with_oracle, new
        self.backend = subject.make_backend(subject.examined, scaling)
        self.rule, self.rates = subject.rule_of(self.backend), subject.task.new_rates()
        self.policy = ExpectedScale(scaling, self.rule.promises)
        self.loaded: Remembered | None = None  # the loaded state, until the first update
        self.found = Drive()
        self.updates: list[Seen] = []  # some elements of each
        self.first: Seen | None = None  # the step whose buffers are compared; None where they cannot be compared
        self.finite: Seen | None = None  # the first step whose gradients are finite

    def load(self, state: State) -> None:
        """Loads a state of the backend's own, whose parameters are the initial ones, before the first step."""
        self.backend.load_state_dict(state)
        self.policy.load(state["loss_scale"])
        tensors = dict(state["optimizer"])
        counts = [int(count) for count in tensors.pop("step", {}).values()]
        some = {kind: numerics.spreads(of_kind) for kind, of_kind in tensors.items()}
        self.loaded = Remembered(some, max(counts, default=0), at_once=True)
        for t in (t for of_kind in tensors.values() for t in of_kind.values()):
            heap.forget(t)  # the backend has read it

    def through(self, follow: Sequence[Batches]) -> "Driver":
        """Takes the first batch until its gradients are finite, then the batches ``follow``."""
        for _ in range(RETRIES if isinstance(self.policy.asked, DynamicLossScale) else 1):
            if self.take(self.subject.first_batch):
                break
        for batch in follow:
            self.take(batch)
        return self

    def take(self, batch: Batches) -> bool:
        """Takes a step; returns whether its gradients were finite."""
        found, (taken, finite) = self.found, self._step(batch)
        kept = replace(taken, after={})  # the weights after it are the backend's own, and would outlive the backend
        if self.subject.exact.buffers and not found.steps and taken.draws_alike:  # as the oracle does in forward
            self.first = kept
        found.steps.append(taken.step(finite, *self.policy.step(finite)))
        if not self.updates and taken.skipped and self.loaded is None:
            found.early[:] = early(self.backend.state_dict()["optimizer"], self.subject.task.optimizer)
        self.rates.count(self.policy.skips and not finite)
        scales = NextScale(float(self.backend.loss_scale()), self.policy.scaling.scale)
        self.found = replace(found, next_scale=scales)
        if finite and not taken.skipped:
            self._write_update(self._without_idle(taken))
        if finite and self.finite is None:
            self.finite = kept
        return finite

    @property
    def first_step(self) -> Exact | None:
        """The first step; None where its gradients are not finite."""
        taken = self.finite
        return Exact(taken.loss, taken.grads, dict(taken.buffers_after)) if taken and not taken.steps else None

    def result(self, replay: Layers | None = None) -> Drive:
        """Returns everything that was written down, and for wrong updates the known mistakes that make them. The
        backend is freed, except in the pass ``first``, whose step may have a forced ``replay``."""
        mistakes = self.rule.mistakes(self.updates, self.found.updates)
        short = mistakes is not None or self.rule.promises.moments != "fp32"
        digits_of_state = digits(self.backend.state_dict()["optimizer"]) if short else {}
        finite, buffers = self._of_oracle(replay) if self.with_oracle else self._of_new_backend()
        idle = self.found.idle if any(self.found.idle) else []
        return replace(
            self.found, finite=finite, buffers=buffers, known_mistakes=mistakes or {}, digits=digits_of_state, idle=idle
        )

    def _step(self, batch: Batches) -> tuple[Seen, bool]:
        """Returns a step, and whether its gradients were finite. They are whole where all of them are compared: of the
        first step in which they are finite, and of a task that clips."""
        backend, lr, task = self.backend, float(self.rates.now), self.rule.task
        walk, scale = Walk(backend, batch, lr), float(backend.loss_scale())
        before, buffers = Stored(backend.master_params()), Stored(backend.buffers())
        draws_alike = forward_as_the_oracle(self.subject.exact, walk)
        walk.through("unscale")
        loss, finite, clips = float(walk.loss), all_finite(backend.grads()), task.clip_norm is not None
        is_whole = clips or (finite and self.finite is None)
        grads = (Stored if is_whole else numerics.spreads)(backend.grads())
        several = task.accumulate > 1 and not walk.in_one_piece
        moved_early = several and moved(before, backend.master_params())
        walk.through("clip")
        clipped = Stored(backend.grads()) if clips and not walk.in_one_piece else grads
        clipped_norm = numerics.norm_of(backend.grads())
        walk.through("step")
        after = {name: p.detach().contiguous() for name, p in backend.master_params().items()}  # row by row, as before
        skipped = bool(backend.skipped)
        walk.finish()
        # Only the buffers after the first step are compared.
        buffers_after = {} if self.found.steps else Stored(backend.buffers())
        remembered = FROM_THE_START if self.updates or self.loaded is None else self.loaded
        taken = Seen(
            before, after, clipped, lr, remembered, loss=loss, grads=grads, scale=scale, skipped=skipped,
            moved_early=moved_early, in_one_piece=walk.in_one_piece, draws_alike=draws_alike, norm=said_norm(backend),
            buffers=buffers, buffers_after=buffers_after, batch=batch, number=int(self.rates.updates),
            steps=len(self.found.steps), clipped_norm=clipped_norm,
        )  # fmt: skip
        # If the gradients are not shown, as in a skipped step, an infinite loss says that they are not finite, and so
        # does a skipped step of a backend that scales its loss.
        return taken, finite if grads else math.isfinite(loss) and not (self.policy.skips and skipped)

    def _without_idle(self, taken: Seen) -> Seen:
        """Writes down whether parameters without a gradient moved, and returns the step without their gradients."""
        loss_fn = self.rule.task.loss_fn
        names = idle(self.subject.examined, loss_fn, taken.batch, taken.grads, taken.before, taken.buffers)
        self.found.idle.append(moved_ones(names, taken.before, taken.after))
        if not names:
            return taken
        shown = {name: g for name, g in taken.grads.items() if name not in names}
        return replace(taken, grads=shown, clipped={name: taken.clipped[name] for name in shown})

    def _write_update(self, taken: Seen) -> None:
        found, task = self.found, self.rule.task
        part = taken.in_part(numerics.SPREAD)
        found.updates.append(errors := self.rule.errors(part))
        self.updates.append(part.in_part())
        if errors and not (found.steps[-1].moved or any(e.lost > e.lost_in_fp32 for e in errors.values())):
            found.steps[-1] = replace(found.steps[-1], at_rest=True)
        if taken.grads and task.clip_norm is not None:
            shown = None if taken.in_one_piece else taken.grads
            found.clips.append(clip_errors(shown, taken.clipped, taken.norm, task.clip_norm, task.clip_norm_type))

    def _of_oracle(self, replay: Layers | None) -> tuple[Gradients | None, Errors]:
        """Returns the first finite step, and the buffers after the first step, compared with the oracle's."""
        exact, taken = self.subject.exact, self.finite
        buffers = self._buffers(exact.buffers)
        if taken is None:
            return None, buffers
        grads = taken.grads if taken.draws_alike else {}  # gradients of other masks are no errors
        if taken.in_one_piece and (factor := self.rule.clip_factor(taken.norm)) < 1:
            grads = {name: g / factor for name, g in grads.items()}
        found = self._compared(taken, grads, exact)
        shown = effective_precision(self.subject, grads, found.gradients, replay) if grads else None
        return replace(found, effective_precision=shown), buffers

    def _of_new_backend(self) -> tuple[Gradients | None, Errors]:
        """Returns the same step and buffers compared with a new backend at the same weights."""
        del self.backend
        heap.trim()
        finite, buffers, again = None, {}, None
        if (taken := self.finite) is not None:
            again = self.new or self._again(taken, taken.scale)
            finite = self._compared(taken, taken.grads if taken.draws_alike else {}, again)
        if (taken := self.first) is not None:
            if again is None or taken is not self.finite:
                # Forward does not depend on the loss scale. At the scale of the finite step nothing overflows.
                again = self._again(taken, (self.finite or taken).scale)
            buffers = self._buffers(again.buffers)
        return finite, buffers

    def _compared(self, taken: Seen, grads: Mapping[str, Tensor], exact: Exact) -> Gradients:
        scale = promised_scaling(self.subject.scaling, self.rule.promises).scale
        return replace(compared(taken.loss, grads, exact), subnormal=self.subject.exact.subnormal(scale))

    def _again(self, taken: Seen, scale: float) -> Exact:
        """Returns a step as a new backend takes it."""
        network = with_values(self.subject.examined, taken.before, taken.buffers)
        return new_step(self.subject, network, scale, taken.batch, taken.lr)

    def _buffers(self, expected: Mapping[str, Tensor]) -> Errors:
        """Returns the errors of the buffers after the first step; empty where there are none."""
        if self.first is None:
            return {}
        restored = self.first.skipped and self.rule.promises.restores_buffers
        return gradient_errors(self.first.buffers_after, buffers_of(self.subject.examined) if restored else expected)
