"""Bugs that other libraries had in a training step, each a few lines away from ``amp`` or ``master_weights``.

    python -m mpcompare +experiment=real_bugs

docs/real_bugs.md says where each of them was found, with many more, and which the verdict finds.
"""

import struct
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.torch_model import clip_gradients
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Params, Task


class ClipsScaledGradients(Amp):
    """Lightning 1.4.8 clips before it unscales, so the norm is as many times too large as the loss scale."""

    def unscale(self) -> None:
        self.grad_norm = clip_gradients(self.task, self.model.parameters())
        super().unscale()

    def clip(self) -> None:
        pass


class ClipsOtherTensors(MasterWeights):
    """Megatron-LM's MFSDP v2 clips ``decoupled_grad`` where the optimizer reads ``grad``, so nothing is clipped."""

    def clip(self) -> None:
        kept = {name: g.clone() for name, g in self.grads().items()}
        super().clip()
        for name, g in kept.items():
            self.masters[name].grad = g


class ClipsEachMicroBatch(MasterWeights):
    """tt-train clips the sum of gradients after the backward pass of every micro-batch, not once before the update."""

    def backward(self) -> None:
        super().backward()
        if self.task.clip_norm is not None:
            largest = self.task.clip_norm * self.scaling.scale
            nn.utils.clip_grad_norm_(self.masters.values(), largest, self.task.clip_norm_type)


class SumsTheLosses(Amp):
    """transformers 4.47 does not divide the loss by the number of micro-batches."""

    def backward(self) -> None:
        self.loss = self.loss * self.task.accumulate
        super().backward()


class UpdatesEachMicroBatch(MasterWeights):
    """entrenar's trainer for CUDA updates after each sequence; its setting for accumulation only counts."""

    lr: float | Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.grads():  # the gradients of the micro-batch before
            self.unscale()
            self.clip()
            super().step(self.task.optimizer.lr if self.lr is None else self.lr)
            self.optimizer.zero_grad(set_to_none=True)
        return super().forward(x, y)

    def backward(self) -> None:
        self.loss = self.loss * self.task.accumulate
        super().backward()

    def step(self, lr: float | Tensor) -> None:
        self.lr = lr
        super().step(lr)


class OwnRule(MasterWeights):
    """``master_weights`` with an optimizer of its own."""

    def step(self, lr: float | Tensor) -> None:
        self.skipped = self.found_inf
        if self.skipped:
            return
        with torch.no_grad():
            for name, p in self.params.items():
                master = self.masters[name]
                if master.grad is not None:
                    state = self.optimizer.state[master]
                    if not state:
                        state.update(self.task.optimizer.initial_state(master))
                    self.rule(master, master.grad, state, float(lr))
                p.copy_(master)

    def rule(self, w: Tensor, g: Tensor, state: Params, lr: float) -> None:
        """Updates one tensor and what is remembered of it."""
        raise NotImplementedError


class OwnAdamW(OwnRule):
    """``master_weights`` with an AdamW of its own, in parts that a bug can replace."""

    @property
    def adam(self) -> Any:
        """The optimizer, for its constants."""
        return self.task.optimizer

    def rule(self, w: Tensor, g: Tensor, state: Params, lr: float) -> None:
        m, v, updates = self.means(g, state)
        self.decay(w, lr)
        self.move(w, m, v, updates, lr)

    def means(self, g: Tensor, state: Params) -> tuple[Tensor, Tensor, int]:
        """Returns the means of g and of g^2, both updated, and the number of updates."""
        beta1, beta2 = self.adam.betas
        updates = int(state["step"].add_(1))
        m = state["exp_avg"].mul_(beta1).add_(g, alpha=1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        return m, v, updates

    def decay(self, w: Tensor, lr: float) -> None:
        w.mul_(1 - lr * self.adam.weight_decay)

    def move(self, w: Tensor, m: Tensor, v: Tensor, updates: int, lr: float) -> None:
        beta1, beta2 = self.adam.betas
        denominator = v.div(1 - beta2**updates).sqrt_().add_(self.adam.eps)
        w.addcdiv_(m, denominator, value=-lr / (1 - beta1**updates))


def truncated(value: float) -> float:
    """Returns a number cut off after the 16 bits that bf16 holds."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (result,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(result)


class ConstantsInBf16(OwnAdamW):
    """tt-metal's moreh_adamw cuts its constants off to bf16: beta2 = 0.999 becomes 0.99609."""

    @property
    def adam(self) -> Any:
        exact = super().adam
        beta1, beta2 = map(truncated, exact.betas)
        decay = truncated(exact.weight_decay)
        return replace(exact, betas=(beta1, beta2), eps=truncated(exact.eps), weight_decay=decay)

    def rule(self, w: Tensor, g: Tensor, state: Params, lr: float) -> None:
        super().rule(w, g, state, truncated(lr))


class CountsEachTensor(OwnAdamW):
    """flashlight's Adam counts once for each tensor, so later tensors, and all in later updates, are corrected for too
    many updates. Its eps is added before the correction, and its weights decay by ``weight_decay`` itself."""

    def means(self, g: Tensor, state: Params) -> tuple[Tensor, Tensor, int]:
        state["step"].fill_(max(int(each["step"]) for each in self.optimizer.state.values()))
        return super().means(g, state)

    def decay(self, w: Tensor, lr: float) -> None:
        w.mul_(1 - self.adam.weight_decay)

    def move(self, w: Tensor, m: Tensor, v: Tensor, updates: int, lr: float) -> None:
        beta1, beta2 = self.adam.betas
        correction = (1 - beta2**updates) ** 0.5 / (1 - beta1**updates)
        w.addcdiv_(m, v.sqrt().add_(self.adam.eps), value=-lr * correction)


class EpsBeforeCorrection(OwnAdamW):
    """AdamW of transformers adds eps before it corrects the bias, and decays the weight that is updated already."""

    def rule(self, w: Tensor, g: Tensor, state: Params, lr: float) -> None:
        beta1, beta2 = self.adam.betas
        m, v, updates = self.means(g, state)
        correction = (1 - beta2**updates) ** 0.5 / (1 - beta1**updates)
        w.addcdiv_(m, v.sqrt().add_(self.adam.eps), value=-lr * correction)
        w.add_(w, alpha=-lr * self.adam.weight_decay)


class AdamWAsAdam(OwnAdamW):
    """AdamW of nntrainer adds the decay to the gradient, and keeps m and v in the 16 bits of the weights."""

    def rule(self, w: Tensor, g: Tensor, state: Params, lr: float) -> None:
        m, v, updates = self.means(g.add(w, alpha=self.adam.weight_decay), state)
        for mean in (m, v):
            mean.copy_(mean.to(self.compute_dtype))
        self.move(w, m, v, updates, lr)


class OwnScheduler(Amp):
    """``amp`` with a scheduler of its own, whose count is in the checkpoint."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.count = 0

    def step(self, lr: float | Tensor) -> None:
        super().step(self.task.optimizer.lr * self.task.schedule.factor(self.count))
        self.advance()

    def advance(self) -> None:
        """Moves the count after a step that was taken or skipped."""
        raise NotImplementedError

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "loss_scale": {**state["loss_scale"], "scheduler": self.count}}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.count = int(state["loss_scale"].get("scheduler", 0))


class SchedulerMovesOnSkip(OwnScheduler):
    """Lightning moves the scheduler in steps that the GradScaler skips."""

    def advance(self) -> None:
        self.count += 1


class SchedulerCountsMicroBatches(OwnScheduler):
    """accelerate 0.15 moves the scheduler once for each micro-batch."""

    def advance(self) -> None:
        self.count += 0 if self.skipped else self.task.accumulate


class ScalerNotSaved(Amp):
    """ultralytics before 8.3.203 leaves the GradScaler out of its checkpoints, so the loss scale begins anew."""

    def state_dict(self) -> State:
        return {**super().state_dict(), "loss_scale": {}}
