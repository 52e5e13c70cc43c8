"""Mistakes that people make with a training step, each a few lines away from ``scratch``, to see what they cost.

    python -m mpcompare +experiment=clipping        +experiment=accumulation        +experiment=adamw
    python -m mpcompare +experiment=resume          +experiment=as_published

None of them is an error message: training goes on, and the loss often looks plausible.
"""

import copy
from dataclasses import asdict

import torch
from torch import Tensor

from mpcompare.backends.scratch import Scratch
from mpcompare.contract import State
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.tasks.optimizers import Adam, AdamW


class ClipsBeforeUnscale(Scratch):
    """The norm is taken of the scaled gradients: it is ``loss_scale`` times too large, and the gradients are clipped to
    ``clip_norm / loss_scale``."""

    def unscale(self) -> None:
        clip_norm = self.task.clip_norm
        if clip_norm is not None:
            norms = [torch.linalg.vector_norm(g.float()) for g in self.scaled_grads.values()]
            factor = (clip_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
            for g in self.scaled_grads.values():
                g.mul_(factor)
        super().unscale()


class ClipsEachTensor(Scratch):
    """Each gradient is clipped by a norm of its own: the step goes in another direction."""

    def clip(self) -> None:
        clip_norm, norms = self.task.clip_norm, []
        if clip_norm is None:
            return
        for g in self.unscaled.values():
            norms.append(torch.linalg.vector_norm(g))
            g.mul_((clip_norm / (norms[-1] + 1e-6)).clamp(max=1.0))
        self.grad_norm = torch.linalg.vector_norm(torch.stack(norms))


class SumsTheLoss(Scratch):
    """The loss is not divided by the number of micro-batches: every gradient is that many times too large."""

    def backward(self) -> None:
        self.dlogits *= self.task.accumulate
        super().backward()


class UnscalesEachMicroBatch(Scratch):
    """The gradients' sum is unscaled after each micro-batch: the first one's gradients are unscaled again and again."""

    def backward(self) -> None:
        super().backward()
        if self.task.accumulate > 1:
            for g in self.scaled_grads.values():
                g.mul_(self.scaling.inv_scale)

    def unscale(self) -> None:
        super().unscale()
        if self.task.accumulate > 1:
            for g in self.unscaled.values():
                g.mul_(self.scaling.scale)


class MomentsIn16Bits(Scratch):
    """Adam's m and v are kept in 16 bits: v moves by a thousandth of itself in a step, and stands still."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for remembered in self.remembered.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                if kind in remembered:
                    remembered[kind].copy_(remembered[kind].to(self.compute_dtype))


class DecaysTheGradient(Scratch):
    """AdamW's decay is added to the gradient, as Adam's is: the division by sqrt(v) takes most of the decay away."""

    def step(self, lr: float | Tensor) -> None:
        optimizer = self.optimizer
        if isinstance(optimizer, AdamW):
            self.optimizer = Adam(**asdict(optimizer))
        super().step(lr)
        self.optimizer = optimizer


class Resumed(Scratch):
    """Training stops after ten steps and goes on from a checkpoint that holds everything: no mistake."""

    after, steps = 10, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.steps == 0:
            self.first = copy.deepcopy(self.state_dict())
        return super().forward(x, y)

    def update(self) -> None:
        super().update()
        self.steps += 1
        if self.steps == self.after:
            self.load_state_dict(self.saved(copy.deepcopy(self.state_dict())))

    def saved(self, state: State) -> State:
        """Returns the state as the checkpoint holds it."""
        return state


class ResumedWithoutScale(Resumed):
    """The loss scale begins anew, and with it the search for one that does not overflow: steps are skipped again."""

    def saved(self, state: State) -> State:
        return {**state, "loss_scale": self.first["loss_scale"]}


class ResumedWithoutMoments(Resumed):
    """The optimizer's state is gone: momentum begins at 0, and Adam takes its first, largest steps again."""

    def saved(self, state: State) -> State:
        return {**state, "optimizer": {}}


class ResumedFromCopies(Resumed):
    """The checkpoint holds the 16-bit weights: the masters lose the digits for which they were kept in fp32. Once in a
    run this is within the noise, and the loss does not show it."""

    def saved(self, state: State) -> State:
        return {**state, "params": {name: p.to(self.compute_dtype).float() for name, p in state["params"].items()}}


class DoublesAfterEveryStep(Scratch):
    """The scaler of a lecture: the scale doubles after every good step, halves after one that overflows, and no step is
    skipped. So a step soon overflows, and the inf is in the weights for good."""

    def step(self, lr: float | Tensor) -> None:
        overflows, self.found_inf = self.found_inf, False
        super().step(lr)
        self.found_inf = overflows

    def update(self) -> None:
        if isinstance(self.scaling, DynamicLossScale):
            self.scaling.growth_tracker = self.scaling.growth_interval - 1  # one good step is enough
        super().update()


class MultipliesAfterBackward(Scratch):
    """The loop of a notebook: the loss is not scaled, and after backward the gradients of the masters are multiplied by
    the scale. What fp16 has lost by then stays lost, and every update is that many times too large."""

    def backward(self) -> None:
        self.dlogits /= self.scaling.scale
        super().backward()

    def unscale(self) -> None:
        super().unscale()
        for g in self.unscaled.values():
            g.mul_(self.scaling.scale**2)
