"""Planted bugs of what comes between gradients and weights: accumulation, clipping, optimizer, schedule, resuming."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from support.backends import BACKENDS
from support.correct_recipe import WholeStep
from support.judging import examined
from support.tasks import make_task
from torch import Tensor, nn

from mpcompare.backends import scratch
from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.scratch import Scratch
from mpcompare.contract import Backend, State
from mpcompare.loss_scale import LossScale, state_of
from mpcompare.records import Run
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Cosine, Warmup
from mpcompare.tasks.task import Params, Task
from mpcompare.testing import examined as examined_module

SAMPLES, STEPS = 2560, 12
BASE = make_task(in_features=784, hidden=[64], out_features=10, batch_size=128, samples=SAMPLES, lr=0.05)


@dataclass(frozen=True)
class Bug:
    """A planted bug.

    Attributes:
        cause: what the verdict should call it.
        precisions: those in which it is a bug at all.
        task: what the task must be for the bug to exist.
        invisible: why no check can see it at this task; empty if one can.
        batches: of a harness that is wrong, in its stead.
    """

    backend: type[Backend]
    cause: str
    precisions: tuple[str, ...] = ("fp16", "bf16")
    task: dict[str, Any] = field(default_factory=dict)
    invisible: str = ""
    batches: Callable[[Dataset, int], Iterator[tuple[Tensor, Tensor]]] = batches


RECIPE: dict[str, Bug] = {}
FP16 = ("fp16",)
CLIP: dict[str, Any] = {"clip_norm": 0.5}
ACCUMULATE: dict[str, Any] = {"accumulate": 4}
ADAM: dict[str, Any] = {"optimizer": Adam(1e-3)}
ADAMW: dict[str, Any] = {"optimizer": AdamW(1e-3, weight_decay=0.1)}
MOMENTUM: dict[str, Any] = {"optimizer": Sgd(0.05, 0.9)}
WARMUP: dict[str, Any] = {"schedule": Warmup(8)}


def plants(cause: str, **where: Any) -> Callable[[type[Backend]], type[Backend]]:
    def register(backend: type[Backend]) -> type[Backend]:
        RECIPE[backend.__name__] = Bug(backend, cause, **where)
        return backend

    return register


references: dict[str, tuple[Dataset, Run]] = {}


def recipe_reference(bug: Bug, precision: str) -> tuple[Task, Dataset, Run]:
    """Its task, the data, and amp on it."""
    task = replace(BASE, **bug.task)
    key = f"{precision} {bug.task}"
    if key not in references:
        data = digits(0, SAMPLES)
        references[key] = data, examined("amp", BACKENDS["amp"], task, data, precision, steps=STEPS, noise=2)
    return task, *references[key]


def planted_run(name: str, bug: Bug, precision: str) -> tuple[Run, Run]:
    """The run with the bug, and that of amp."""
    task, data, amp = recipe_reference(bug, precision)
    with mock.patch.object(examined_module, "batches", bug.batches):
        return examined(name, bug.backend, task, data, precision, steps=STEPS), amp


# Clipping.


@plants("clip", precisions=FP16, task=CLIP)
class ClippedBeforeUnscaling(Scratch):
    def unscale(self) -> None:
        norm = torch.linalg.vector_norm(torch.stack([g.float().norm() for g in self.scaled_grads.values()]))
        factor = (self.task.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self.scaled_grads = {name: g.float() * factor for name, g in self.scaled_grads.items()}
        super().unscale()


@plants("clip", precisions=FP16, task=CLIP)
class AmpClippedBeforeUnscaling(Amp):
    """``unscale_`` is forgotten, so that GradScaler unscales what is clipped already."""

    def unscale(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_norm or 0.0)
        super().unscale()


@plants("clip", precisions=FP16, task=CLIP)
class NormTimesTheScale(Scratch):
    def clip(self) -> None:
        norms = torch.stack([g.norm() for g in self.unscaled.values()])
        self.grad_norm = torch.linalg.vector_norm(norms) * self.scaling.scale
        factor = (self.task.clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
        for g in self.unscaled.values():
            g.mul_(factor)


@plants("clip", task=CLIP)
class NormOfEachTensor(Scratch):
    def clip(self) -> None:
        before = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()
        for name, g in before.items():
            self.unscaled[name] = g * (self.task.clip_norm / (g.norm() + 1e-6)).clamp(max=1.0)


@plants("clip", task=CLIP)
class NormsAdded(Scratch):
    def clip(self) -> None:
        self.grad_norm = torch.stack([g.norm() for g in self.unscaled.values()]).sum()
        factor = (self.task.clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
        for g in self.unscaled.values():
            g.mul_(factor)


@plants("clip", task=CLIP)
class ClippedOnlyInWords(MasterWeights):
    """The norm is right, and the gradients stay what they were."""

    def clip(self) -> None:
        before = {name: master.grad.clone() for name, master in self.masters.items() if master.grad is not None}
        super().clip()
        for name, g in before.items():
            self.masters[name].grad = g


@plants("clip", task=CLIP)
class UpdatedFromUnclippedGradients(Scratch):
    def clip(self) -> None:
        self.before = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()

    def step(self, lr: float | Tensor) -> None:
        clipped, self.unscaled = self.unscaled, self.before
        super().step(lr)
        self.unscaled = clipped


@plants("clip", task={"clip_norm": 0.05, "clip_norm_type": float("inf")})
class EachElementByItself(Scratch):
    """As ``clip_grad_value_`` does."""

    def clip(self) -> None:
        before = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()
        for name, g in before.items():
            self.unscaled[name] = g.clamp(-self.task.clip_norm, self.task.clip_norm)


@plants("clip", task=CLIP)
class RootForgotten(Scratch):
    """The sum of squares instead of its root."""

    def clip(self) -> None:
        self.grad_norm = torch.stack([g.square().sum() for g in self.unscaled.values()]).sum()
        factor = (self.task.clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
        for g in self.unscaled.values():
            g.mul_(factor)


@plants("clip", task={**CLIP, **WARMUP})
class NormOfTheStepBefore(Scratch):
    """It saves the wait for this one's."""

    def clip(self) -> None:
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in self.unscaled.values()]))
        factor = (self.task.clip_norm / (getattr(self, "last", norm) + 1e-6)).clamp(max=1.0)
        for g in self.unscaled.values():
            g.mul_(factor)
        self.grad_norm = norm
        if not self.found_inf:
            self.last = norm


@plants("clip", task=CLIP)
class WholeStepNotClipped(WholeStep):
    def clip(self) -> None:
        kept = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()
        self.unscaled = kept


@plants("clip", precisions=FP16, task=CLIP)
class WholeStepNormTimesTheScale(WholeStep):
    clip = NormTimesTheScale.clip


@plants("skip", precisions=FP16, task=CLIP)
class InfClippedInsteadOfSkipped(Scratch):
    def clip(self) -> None:
        for g in self.unscaled.values():
            g.nan_to_num_(0.0, 1.0, -1.0)
        self.found_inf = False
        super().clip()


# Accumulation.


@plants("accumulation", task=ACCUMULATE)
class LossNotDivided(Scratch):
    def backward(self) -> None:
        self.dlogits *= self.task.accumulate
        super().backward()


@plants("accumulation", task=ACCUMULATE)
class LossDividedTwice(MasterWeights):
    def backward(self) -> None:
        self.loss = self.loss / self.task.accumulate
        super().backward()


@plants("accumulation", precisions=FP16, task=ACCUMULATE)
class UnscaledOnceAMicroBatch(Scratch):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for g in self.scaled_grads.values():
            g.mul_(self.scaling.inv_scale)
        return super().forward(x, y)


@plants("accumulation", task=ACCUMULATE)
class OnlyTheLastMicroBatch(Amp):
    """``zero_grad`` in front of every micro-batch."""

    def backward(self) -> None:
        self.optimizer.zero_grad()
        super().backward()


@plants("accumulation", task=ACCUMULATE)
class FirstMicroBatchDropped(MasterWeights):
    """Gradients are dropped at the start of the second one."""

    def backward(self) -> None:
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen % self.task.accumulate == 2:
            self.optimizer.zero_grad()
        super().backward()


@plants("products", task=ACCUMULATE, invisible="as each of four terms is rounded to 16 bits, so may their sum be")
class MicroBatchesSummedIn16Bits(Scratch):
    def add_gradient(self, name: str, g: Tensor) -> None:
        super().add_gradient(name, g)
        self.scaled_grads[name] = self.scaled_grads[name].to(self.compute_dtype).float()


@plants("accumulation", task=ACCUMULATE)
class UpdateOnceAMicroBatch(Scratch):
    lr = 0.05

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.scaled_grads:
            super().unscale()
            super().step(self.lr)
            del self.unscaled
        return super().forward(x, y)


@plants("skip", precisions=FP16, task=ACCUMULATE)
class InfOfFirstMicroBatchForgotten(Scratch):
    """Each micro-batch is searched for inf, and the last one's answer counts."""

    def add_gradient(self, name: str, g: Tensor) -> None:
        self.of_this = {**getattr(self, "of_this", {}), name: g}
        super().add_gradient(name, g)

    def unscale(self) -> None:
        super().unscale()
        self.found_inf = self.scaling.found_inf(self.of_this.values())


@plants("skip", precisions=FP16, task=ACCUMULATE)
class InfOfFirstMicroBatchDropped(InfOfFirstMicroBatchForgotten):
    """And where it holds inf, it is left out."""

    def unscale(self) -> None:
        super().unscale()
        for g in self.unscaled.values():
            g.nan_to_num_(0.0, 0.0, 0.0)


# The optimizer.


class OtherAdam(Scratch):
    """``scratch`` with another Adam."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        raise NotImplementedError

    def step(self, lr: float | Tensor) -> None:
        with mock.patch.object(scratch, "adam", self.rule_of):
            super().step(lr)


def adam(
    rule: Adam | AdamW, w: Tensor, g: Tensor, remembered: Params, lr: float, corrects: bool = True, inside: bool = False
) -> None:
    """Without decay, step for step as torch's."""
    updates = int(remembered["step"].add_(1))
    c1, c2 = (1 - beta**updates for beta in rule.betas) if corrects else (1.0, 1.0)
    m = remembered["exp_avg"].mul_(rule.betas[0]).add_(g, alpha=1 - rule.betas[0])
    v = remembered["exp_avg_sq"].mul_(rule.betas[1]).addcmul_(g, g, value=1 - rule.betas[1]).div(c2)
    w.addcdiv_(m, v.add(rule.eps).sqrt() if inside else v.sqrt().add(rule.eps), value=-lr / c1)


@plants("weight decay", task=ADAMW)
class DecayInTheGradient(OtherAdam):
    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w, g.add(w, alpha=rule.weight_decay), remembered, lr)


@plants("weight decay", precisions=("bf16",), task=ADAMW)
class DecayOfTheCopies(OtherAdam):
    """Of the 16-bit weights. In fp16 that moves a weight by lr weight_decay 2^-11 = 5e-8 of it: fp32 rounds as much."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        decay = w.to(self.compute_dtype).float() * (lr * rule.weight_decay)
        adam(rule, w.sub_(decay), g, remembered, lr)


@plants("weight decay", precisions=FP16, task={"optimizer": Sgd(0.05, 0.9, weight_decay=0.01)})
class DecayBeforeUnscaling(Scratch):
    """It is added to the scaled gradients, and so is divided by the scale."""

    def unscale(self) -> None:
        for name, master in self.masters.items():
            decay = self.rule.weight_decay * master.to(self.compute_dtype)
            self.scaled_grads[name] = self.scaled_grads[name] + decay
        super().unscale()

    def step(self, lr: float | Tensor) -> None:
        kept, self.rule = self.rule, replace(self.rule, weight_decay=0.0)
        super().step(lr)
        self.rule = kept


@plants("weight decay", task={**ADAMW, **WARMUP})
class DecayAtTheFirstRate(OtherAdam):
    """Not at the schedule's."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w.mul_(1 - rule.lr * rule.weight_decay), g, remembered, lr)


@plants("weight decay", task=ADAMW)
class BiasesNotDecayed(Amp):
    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        (group,) = self.optimizer.param_groups
        weights, biases = ([p for p in group["params"] if (p.dim() > 1) is large] for large in (True, False))
        group["params"] = weights
        self.optimizer.add_param_group({"params": biases, "weight_decay": 0.0})


@plants("eps", task=ADAM)
class EpsInsideTheRoot(OtherAdam):
    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w, g, remembered, lr, inside=True)


@plants("eps", precisions=FP16, task=ADAM)
class EpsInFp16(OtherAdam):
    """1e-8 is 0 there."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        eps = torch.tensor(rule.eps).half().item()
        updates = int(remembered["step"].add_(1))
        c1, c2 = (1 - beta**updates for beta in rule.betas)
        m = remembered["exp_avg"].mul_(rule.betas[0]).add_(g, alpha=1 - rule.betas[0])
        v = remembered["exp_avg_sq"].mul_(rule.betas[1]).addcmul_(g, g, value=1 - rule.betas[1])
        w.addcdiv_(m, v.div(c2).sqrt_().add_(eps), value=-lr / c1)


@plants("bias correction", task=ADAM)
class NoBiasCorrection(OtherAdam):
    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w, g, remembered, lr, corrects=False)


@plants("bias correction", precisions=FP16, task=ADAM)
class BiasCorrectionCountsSkippedSteps(Scratch):
    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        if self.skipped:
            for remembered in self.remembered.values():
                remembered["step"].add_(1)


@plants("moments", task=ADAM)
class MomentsIn16Bits(Scratch):
    """It says that they are fp32."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for remembered in self.remembered.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                remembered[kind].copy_(remembered[kind].to(self.compute_dtype))


@plants("moments", task=MOMENTUM)
class MomentumIn16Bits(Scratch):
    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for remembered in self.remembered.values():
            remembered["momentum_buffer"].copy_(remembered["momentum_buffer"].to(self.compute_dtype))


@plants("optimizer", task=ADAM)
class OneDenominatorForEachTensor(OtherAdam):
    """The mean of v over the tensor."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        kept = w.clone()
        adam(rule, w, g, remembered, lr)
        updates = int(remembered["step"])
        c1, c2 = (1 - beta**updates for beta in rule.betas)
        denominator = (remembered["exp_avg_sq"].mean() / c2).sqrt() + rule.eps
        w.copy_(kept - lr / c1 * remembered["exp_avg"] / denominator)


@plants("optimizer", precisions=FP16, task=MOMENTUM)
class MomentumDecaysInASkippedStep(Scratch):
    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        if self.skipped:
            for remembered in self.remembered.values():
                remembered["momentum_buffer"].mul_(self.rule.momentum)


@plants("optimizer", task=ADAM)
class LastLayerNotUpdated(Scratch):
    def step(self, lr: float | Tensor) -> None:
        last = f"W{len(self.layers)}"
        kept = self.masters[last].clone()
        super().step(lr)
        self.masters[last].copy_(kept)


@plants("momentum", task={"optimizer": Sgd(0.05, 0.9, nesterov=True)})
class NesterovLeftOut(Scratch):
    def step(self, lr: float | Tensor) -> None:
        kept, self.rule = self.rule, replace(self.rule, nesterov=False)
        super().step(lr)
        self.rule = kept


@plants("momentum", task={**MOMENTUM, **WARMUP})
class RateInTheMomentum(Scratch):
    """``v = momentum v + lr g; w = w - v``."""

    def step(self, lr: float | Tensor) -> None:
        kept = {name: g.clone() for name, g in self.unscaled.items()}
        for g in self.unscaled.values():
            g.mul_(lr)
        super().step(1.0)
        self.unscaled = kept


# The schedule.


@plants("schedule", task=WARMUP)
class ScheduleOneStepLate(Scratch):
    """``scheduler.step()`` in front of the optimizer's, which then has the rate of the step before."""

    def step(self, lr: float | Tensor) -> None:
        super().step(getattr(self, "last", lr))
        if not self.skipped:
            self.last = lr


class OwnSchedule(Scratch):
    """Its own count of steps."""

    taken = 0

    def step(self, lr: float | Tensor) -> None:
        super().step(self.task.optimizer.lr * self.task.schedule.factor(self.taken))
        self.count()

    def count(self) -> None:
        self.taken += 1


@plants("schedule", precisions=FP16, task={"schedule": Cosine(warmup_steps=4), **ADAM})
class ScheduleAdvancesOnASkip(OwnSchedule):
    pass


@plants("schedule", task={**WARMUP, **ACCUMULATE})
class ScheduleCountsMicroBatches(OwnSchedule):
    def count(self) -> None:
        self.taken += 0 if self.skipped else self.task.accumulate


@plants("schedule", task={"schedule": Cosine(warmup_steps=4)})
class ScheduleLeftOut(Amp):
    def step(self, lr: float | Tensor) -> None:
        super().step(self.task.optimizer.lr)


# Resuming.


@plants("resume", precisions=FP16)
class ScaleLost(Scratch):
    def load_state_dict(self, state: State) -> None:
        scale = {name: value for name, value in state["loss_scale"].items() if name != "scale"}
        super().load_state_dict({**state, "loss_scale": scale})


@plants("resume", precisions=FP16)
class TrackerLost(Scratch):
    def state_dict(self) -> State:
        return {**super().state_dict(), "loss_scale": {**state_of(self.scaling), "growth_tracker": 0}}


@plants("resume", task=ADAM)
class MomentsLost(Scratch):
    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({**state, "optimizer": {"step": state["optimizer"].get("step", {})}})


@plants("resume", task=ADAM)
class CountOfUpdatesLost(Amp):
    def load_state_dict(self, state: State) -> None:
        steps = {name: torch.zeros_like(t) for name, t in state["optimizer"].get("step", {}).items()}
        super().load_state_dict({**state, "optimizer": {**state["optimizer"], "step": steps}})


@plants("resume", task=ADAM)
class MastersFromTheCopies(Scratch):
    """The 16-bit weights are saved, and the masters made of them."""

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "params": {name: p.to(self.compute_dtype).float() for name, p in state["params"].items()}}


def from_the_first_again(data: Dataset, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As a run that is resumed after 6 steps and has lost its place in the data."""
    for number, batch in enumerate(batches(data, batch_size)):
        if number == STEPS // 2:
            yield from batches(data, batch_size)
        yield batch


@plants("run", batches=from_the_first_again, task={"batch_size": 32})
class DataPositionLost(Scratch):
    """What is wrong is the harness."""
