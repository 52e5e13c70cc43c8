"""Planted bugs of what comes between gradients and weights: accumulation, clipping, optimizer, schedule, resuming."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from planted.registry import BF16, FP16, Family
from support.correct import WholeStep
from support.tasks import make_task
from torch import Tensor, nn

from mpcompare.backends import scratch
from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.scratch import Scratch
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale, state_of
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Cosine, Warmup
from mpcompare.tasks.task import Params, Task

SAMPLES, STEPS = 2560, 12
BASE = make_task(in_features=784, hidden=[64], out_features=10, batch_size=128, samples=SAMPLES, lr=0.05)
CLIP: dict[str, Any] = {"clip_norm": 0.5}
ACCUMULATE: dict[str, Any] = {"accumulate": 4}
ADAM: dict[str, Any] = {"optimizer": Adam(1e-3)}
ADAMW: dict[str, Any] = {"optimizer": AdamW(1e-3, weight_decay=0.1)}
MOMENTUM: dict[str, Any] = {"optimizer": Sgd(0.05, 0.9)}
WARMUP: dict[str, Any] = {"schedule": Warmup(8)}


def make(**changes: Any) -> tuple[Task, Dataset]:
    return replace(BASE, **changes), digits(0, SAMPLES)


RECIPE = Family("recipe", make, STEPS)


# Clipping.


class OwnNorm(Scratch):
    """``scratch`` that clips by a norm of its own."""

    def norm(self) -> Tensor:
        raise NotImplementedError

    def clip(self) -> None:
        self.grad_norm = self.norm()
        factor = (self.task.clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
        for g in self.unscaled.values():
            g.mul_(factor)


@RECIPE.plants("clip", precisions=FP16, task=CLIP)
class ClippedBeforeUnscaling(Scratch):
    def unscale(self) -> None:
        norm = torch.linalg.vector_norm(torch.stack([g.float().norm() for g in self.scaled_grads.values()]))
        factor = (self.task.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self.scaled_grads = {name: g.float() * factor for name, g in self.scaled_grads.items()}
        super().unscale()


@RECIPE.plants("clip", precisions=FP16, task=CLIP)
class AmpClippedBeforeUnscaling(Amp):
    """``unscale_`` is forgotten, so that GradScaler unscales gradients that are clipped already."""

    def unscale(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_norm or 0.0)
        super().unscale()


@RECIPE.plants("clip", precisions=FP16, task=CLIP)
class NormTimesTheScale(OwnNorm):
    def norm(self) -> Tensor:
        norms = torch.stack([g.norm() for g in self.unscaled.values()])
        return torch.linalg.vector_norm(norms) * self.scaling.scale


@RECIPE.plants("clip", task=CLIP)
class NormOfEachTensor(Scratch):
    def clip(self) -> None:
        before = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()
        for name, g in before.items():
            self.unscaled[name] = g * (self.task.clip_norm / (g.norm() + 1e-6)).clamp(max=1.0)


@RECIPE.plants("clip", task=CLIP)
class NormsAdded(OwnNorm):
    def norm(self) -> Tensor:
        return torch.stack([g.norm() for g in self.unscaled.values()]).sum()


@RECIPE.plants("clip", task=CLIP)
class ClippedOnlyInWords(MasterWeights):
    """The norm is right, and the gradients stay what they were."""

    def clip(self) -> None:
        before = {name: master.grad.clone() for name, master in self.masters.items() if master.grad is not None}
        super().clip()
        for name, g in before.items():
            self.masters[name].grad = g


@RECIPE.plants("clip", task=CLIP)
class UpdatedFromUnclippedGradients(Scratch):
    def clip(self) -> None:
        self.before = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()

    def step(self, lr: float | Tensor) -> None:
        clipped, self.unscaled = self.unscaled, self.before
        super().step(lr)
        self.unscaled = clipped


@RECIPE.plants("clip", task={"clip_norm": 0.05, "clip_norm_type": float("inf")})
class EachElementByItself(Scratch):
    """Each element is clipped by itself, as ``clip_grad_value_`` does."""

    def clip(self) -> None:
        before = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()
        for name, g in before.items():
            self.unscaled[name] = g.clamp(-self.task.clip_norm, self.task.clip_norm)


@RECIPE.plants("clip", task=CLIP)
class RootForgotten(OwnNorm):
    """The norm is the sum of squares, not its root."""

    def norm(self) -> Tensor:
        return torch.stack([g.square().sum() for g in self.unscaled.values()]).sum()


@RECIPE.plants("clip", task={**CLIP, **WARMUP})
class NormOfTheStepBefore(Scratch):
    """The factor comes from the step before, which saves the wait for the norm of this step."""

    def clip(self) -> None:
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in self.unscaled.values()]))
        factor = (self.task.clip_norm / (getattr(self, "last", norm) + 1e-6)).clamp(max=1.0)
        for g in self.unscaled.values():
            g.mul_(factor)
        self.grad_norm = norm
        if not self.found_inf:
            self.last = norm


@RECIPE.plants("clip", task=CLIP)
class WholeStepNotClipped(WholeStep):
    def clip(self) -> None:
        kept = {name: g.clone() for name, g in self.unscaled.items()}
        super().clip()
        self.unscaled = kept


@RECIPE.plants("clip", precisions=FP16, task=CLIP)
class WholeStepNormTimesTheScale(NormTimesTheScale, WholeStep):
    pass


@RECIPE.plants("skip", precisions=FP16, task=CLIP)
class InfClippedInsteadOfSkipped(Scratch):
    def clip(self) -> None:
        for g in self.unscaled.values():
            g.nan_to_num_(0.0, 1.0, -1.0)
        self.found_inf = False
        super().clip()


# Accumulation.


@RECIPE.plants("accumulation", task=ACCUMULATE)
class LossNotDivided(Scratch):
    def backward(self) -> None:
        self.dlogits *= self.task.accumulate
        super().backward()


@RECIPE.plants("accumulation", task=ACCUMULATE)
class LossDividedTwice(MasterWeights):
    def backward(self) -> None:
        self.loss = self.loss / self.task.accumulate
        super().backward()


@RECIPE.plants("accumulation", precisions=FP16, task=ACCUMULATE)
class UnscaledOnceAMicroBatch(Scratch):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for g in self.scaled_grads.values():
            g.mul_(self.scaling.inv_scale)
        return super().forward(x, y)


@RECIPE.plants("accumulation", task=ACCUMULATE)
class OnlyTheLastMicroBatch(Amp):
    """``zero_grad`` is called in front of every micro-batch."""

    def backward(self) -> None:
        self.optimizer.zero_grad()
        super().backward()


@RECIPE.plants("accumulation", task=ACCUMULATE)
class FirstMicroBatchDropped(MasterWeights):
    """Gradients are dropped at the start of the second micro-batch."""

    def backward(self) -> None:
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen % self.task.accumulate == 2:
            self.optimizer.zero_grad()
        super().backward()


@RECIPE.plants("accumulation", task=ACCUMULATE)
class MatricesOfTheFirstMicroBatch(Scratch):
    """Matrices have the gradients of the first micro-batch; the gradients of biases are summed."""

    def add_gradient(self, name: str, g: Tensor) -> None:
        if g.dim() == 1 or name not in self.scaled_grads:
            super().add_gradient(name, g)


@RECIPE.plants(
    "products", task=ACCUMULATE, invisible="as each of four terms is rounded to 16 bits, so may their sum be"
)
class MicroBatchesSummedIn16Bits(Scratch):
    def add_gradient(self, name: str, g: Tensor) -> None:
        super().add_gradient(name, g)
        self.scaled_grads[name] = self.scaled_grads[name].to(self.compute_dtype).float()


@RECIPE.plants("accumulation", task=ACCUMULATE)
class UpdateOnceAMicroBatch(Scratch):
    lr = 0.05

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.scaled_grads:
            super().unscale()
            super().step(self.lr)
            del self.unscaled
        return super().forward(x, y)


@RECIPE.plants("skip", precisions=FP16, task=ACCUMULATE)
class InfOfFirstMicroBatchForgotten(Scratch):
    """Each micro-batch is searched for inf, and the last one's answer counts."""

    def add_gradient(self, name: str, g: Tensor) -> None:
        self.of_this = {**getattr(self, "of_this", {}), name: g}
        super().add_gradient(name, g)

    def unscale(self) -> None:
        super().unscale()
        self.found_inf = self.scaling.found_inf(self.of_this.values())


@RECIPE.plants("skip", precisions=FP16, task=ACCUMULATE)
class InfOfFirstMicroBatchDropped(InfOfFirstMicroBatchForgotten):
    """An inf or NaN in the sum becomes 0."""

    def unscale(self) -> None:
        super().unscale()
        for g in self.unscaled.values():
            g.nan_to_num_(0.0, 0.0, 0.0)


# The optimizer.


class ChangedInASkippedStep(Scratch):
    """``scratch`` that changes what its optimizer remembers in a step that is skipped."""

    def change(self, remembered: Params) -> None:
        raise NotImplementedError

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        if self.skipped:
            for remembered in self.remembered.values():
                self.change(remembered)


class OtherAdam(Scratch):
    """``scratch`` with another Adam."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        raise NotImplementedError

    def step(self, lr: float | Tensor) -> None:
        with mock.patch.object(scratch, "adam", self.rule_of):
            super().step(lr)


def adam(
    rule: Adam | AdamW,
    w: Tensor,
    g: Tensor,
    remembered: Params,
    lr: float,
    corrects: bool = True,
    denominator: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Updates ``w`` as torch's Adam does without decay.

    Args:
        corrects: whether the moments are corrected for their bias.
        denominator: makes the denominator from the corrected second moment; by default its root plus eps.
    """
    updates = int(remembered["step"].add_(1))
    c1, c2 = (1 - beta**updates for beta in rule.betas) if corrects else (1.0, 1.0)
    m = remembered["exp_avg"].mul_(rule.betas[0]).add_(g, alpha=1 - rule.betas[0])
    v = remembered["exp_avg_sq"].mul_(rule.betas[1]).addcmul_(g, g, value=1 - rule.betas[1]).div(c2)
    w.addcdiv_(m, denominator(v) if denominator else v.sqrt().add(rule.eps), value=-lr / c1)


@RECIPE.plants("weight decay", task=ADAMW)
class DecayInTheGradient(OtherAdam):
    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w, g.add(w, alpha=rule.weight_decay), remembered, lr)


@RECIPE.plants("weight decay", precisions=BF16, task=ADAMW)
class DecayOfTheCopies(OtherAdam):
    """The 16-bit weights give the decay. In fp16 this moves a weight by lr weight_decay 2^-11 = 5e-8 of itself, and
    fp32 rounds as much."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        decay = w.to(self.compute_dtype).float() * (lr * rule.weight_decay)
        adam(rule, w.sub_(decay), g, remembered, lr)


@RECIPE.plants("weight decay", task={"optimizer": AdamW(1e-3)})
class DecayAfterTheUpdate(OtherAdam):
    """The weight that is already updated decays, so the update decays, too, by lr weight_decay = 1e-5 of itself."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w, g, remembered, lr)
        w.mul_(1 - lr * rule.weight_decay)


@RECIPE.plants("weight decay", precisions=FP16, task={"optimizer": Sgd(0.05, 0.9, weight_decay=0.01)})
class DecayBeforeUnscaling(Scratch):
    """The decay is added to the scaled gradients, and so is divided by the scale."""

    def unscale(self) -> None:
        for name, master in self.masters.items():
            decay = self.optimizer.weight_decay * master.to(self.compute_dtype)
            self.scaled_grads[name] = self.scaled_grads[name] + decay
        super().unscale()

    def step(self, lr: float | Tensor) -> None:
        kept, self.optimizer = self.optimizer, replace(self.optimizer, weight_decay=0.0)
        super().step(lr)
        self.optimizer = kept


@RECIPE.plants("weight decay", precisions=FP16, task={"optimizer": Sgd(0.05, 0.9, weight_decay=1e-4)})
class DecayTimesTheScale(Scratch):
    """The decay is multiplied by the loss scale, as if the gradients were scaled still."""

    def step(self, lr: float | Tensor) -> None:
        for name, g in self.unscaled.items():
            decay = self.optimizer.weight_decay * (self.scaling.scale - 1)
            g.add_(self.masters[name], alpha=0.0 if self.found_inf else decay)
        super().step(lr)


@RECIPE.plants("weight decay", task={**ADAMW, **WARMUP})
class DecayAtTheFirstRate(OtherAdam):
    """Weights decay at the first learning rate, not at the schedule's."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w.mul_(1 - rule.lr * rule.weight_decay), g, remembered, lr)


@RECIPE.plants("weight decay", task=ADAMW)
class BiasesNotDecayed(Amp):
    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        (group,) = self.optimizer.param_groups
        weights, biases = ([p for p in group["params"] if (p.dim() > 1) is large] for large in (True, False))
        group["params"] = weights
        self.optimizer.add_param_group({"params": biases, "weight_decay": 0.0})


@RECIPE.plants("eps", task=ADAM)
class EpsInsideTheRoot(OtherAdam):
    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w, g, remembered, lr, denominator=lambda v: v.add(rule.eps).sqrt())


@RECIPE.plants("eps", precisions=FP16, task=ADAM)
class EpsInFp16(OtherAdam):
    """eps is fp16, in which 1e-8 is 0."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        eps = torch.tensor(rule.eps).half().item()
        adam(rule, w, g, remembered, lr, denominator=lambda v: v.sqrt().add(eps))


@RECIPE.plants("bias correction", task=ADAM)
class NoBiasCorrection(OtherAdam):
    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        adam(rule, w, g, remembered, lr, corrects=False)


@RECIPE.plants("bias correction", task=ADAM)
class MeanCorrectedInPlace(OtherAdam):
    """The mean of the gradients is corrected where it is kept, and so once more in the next update."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        c1 = 1 - rule.betas[0] ** (int(remembered["step"]) + 1)
        adam(rule, w, g, remembered, lr)
        remembered["exp_avg"].div_(c1)


@RECIPE.plants("bias correction", task=ADAMW)
class RateCorrectedWithTheDecay(OtherAdam):
    """The correction of the bias is a factor of the learning rate, and so of the decay; eps is added before it."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        c1, c2 = (1 - beta ** (int(remembered["step"]) + 1) for beta in rule.betas)
        rate = lr * c2**0.5 / c1
        w.mul_(1 - rate * rule.weight_decay)
        adam(rule, w, g, remembered, rate, corrects=False)


@RECIPE.plants("bias correction", precisions=FP16, task=ADAM)
class BiasCorrectionCountsSkippedSteps(ChangedInASkippedStep):
    def change(self, remembered: Params) -> None:
        remembered["step"].add_(1)


@RECIPE.plants("moments", task=ADAM)
class MomentsIn16Bits(Scratch):
    """The moments are rounded to 16 bits, and said to be fp32."""

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for remembered in self.remembered.values():
            for kind in self.moments:
                remembered[kind].copy_(remembered[kind].to(self.compute_dtype))


@RECIPE.plants("moments", task=MOMENTUM)
class MomentumIn16Bits(MomentsIn16Bits):
    moments = ("momentum_buffer",)


@RECIPE.plants("optimizer", task=ADAM)
class OneDenominatorForEachTensor(OtherAdam):
    """The denominator is made of the mean of v over the tensor."""

    def rule_of(self, rule: Any, w: Tensor, g: Tensor, remembered: Params, lr: float) -> None:
        kept = w.clone()
        adam(rule, w, g, remembered, lr)
        updates = int(remembered["step"])
        c1, c2 = (1 - beta**updates for beta in rule.betas)
        denominator = (remembered["exp_avg_sq"].mean() / c2).sqrt() + rule.eps
        w.copy_(kept - lr / c1 * remembered["exp_avg"] / denominator)


@RECIPE.plants("optimizer", precisions=FP16, task=MOMENTUM)
class MomentumDecaysInASkippedStep(ChangedInASkippedStep):
    def change(self, remembered: Params) -> None:
        remembered["momentum_buffer"].mul_(self.optimizer.momentum)


@RECIPE.plants("update left out", task=ADAM)
class LastLayerNotUpdated(Scratch):
    def step(self, lr: float | Tensor) -> None:
        last = f"W{len(self.layers)}"
        kept = self.masters[last].clone()
        super().step(lr)
        self.masters[last].copy_(kept)


@RECIPE.plants("momentum", task={"optimizer": Sgd(0.05, 0.9, nesterov=True)})
class NesterovLeftOut(Scratch):
    def step(self, lr: float | Tensor) -> None:
        kept, self.optimizer = self.optimizer, replace(self.optimizer, nesterov=False)
        super().step(lr)
        self.optimizer = kept


@RECIPE.plants("momentum", task={**MOMENTUM, **WARMUP})
class RateInTheMomentum(Scratch):
    """``v = momentum v + lr g; w = w - v``."""

    def step(self, lr: float | Tensor) -> None:
        kept = {name: g.clone() for name, g in self.unscaled.items()}
        for g in self.unscaled.values():
            g.mul_(lr)
        super().step(1.0)
        self.unscaled = kept


# The schedule.


@RECIPE.plants("schedule", task=WARMUP)
class ScheduleOneStepLate(Scratch):
    """The optimizer has the rate of the step before."""

    def step(self, lr: float | Tensor) -> None:
        super().step(getattr(self, "last", lr))
        if not self.skipped:
            self.last = lr


class OwnSchedule(Scratch):
    """``scratch`` that follows the schedule by its own count of steps."""

    taken = 0

    def step(self, lr: float | Tensor) -> None:
        super().step(self.task.optimizer.lr * self.task.schedule.factor(self.taken))
        self.count()

    def count(self) -> None:
        self.taken += 1


@RECIPE.plants("schedule", precisions=FP16, task={"schedule": Cosine(warmup_steps=4), **ADAM})
class ScheduleAdvancesOnASkip(OwnSchedule):
    pass


@RECIPE.plants("schedule", task={**WARMUP, **ACCUMULATE})
class ScheduleCountsMicroBatches(OwnSchedule):
    def count(self) -> None:
        self.taken += 0 if self.skipped else self.task.accumulate


@RECIPE.plants("schedule", task={"schedule": Cosine(warmup_steps=4), **ADAM})
class PeakExceeded(Scratch):
    """The rate is 2 % too high once the warm-up is over, and 0 in the end, as it should be."""

    taken = 0

    def step(self, lr: float | Tensor) -> None:
        super().step(1.02 * lr if self.taken >= 4 else lr)
        self.taken += 0 if self.skipped else 1


@RECIPE.plants("schedule", task={"schedule": Cosine(warmup_steps=4)})
class ScheduleLeftOut(Amp):
    def step(self, lr: float | Tensor) -> None:
        super().step(self.task.optimizer.lr)


# Resuming.


@RECIPE.plants("resume", precisions=FP16)
class ScaleLost(Scratch):
    def load_state_dict(self, state: State) -> None:
        scale = {name: value for name, value in state["loss_scale"].items() if name != "scale"}
        super().load_state_dict({**state, "loss_scale": scale})


@RECIPE.plants("resume", precisions=FP16)
class TrackerLost(Scratch):
    def state_dict(self) -> State:
        return {**super().state_dict(), "loss_scale": {**state_of(self.scaling), "growth_tracker": 0}}


@RECIPE.plants("resume", task=ADAM)
class MomentsLost(Scratch):
    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({**state, "optimizer": {"step": state["optimizer"].get("step", {})}})


@RECIPE.plants("resume", task=ADAM)
class CountOfUpdatesLost(Amp):
    def load_state_dict(self, state: State) -> None:
        steps = {name: torch.zeros_like(t) for name, t in state["optimizer"].get("step", {}).items()}
        super().load_state_dict({**state, "optimizer": {**state["optimizer"], "step": steps}})


@RECIPE.plants("schedule", precisions=BF16, task={"schedule": Cosine()})
class RateOfTheStepBeforeOnceLoaded(Scratch):
    """The step after loading has the rate of the step before, which is 2 % larger: gradients in bf16 may differ as
    much."""

    loaded = False

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.loaded = True

    def step(self, lr: float | Tensor) -> None:
        super().step(self.task.optimizer.lr if self.loaded else lr)
        self.loaded = False


@RECIPE.plants("resume", task=ADAM)
class MastersFromTheCopies(Scratch):
    """The 16-bit weights are saved, and the masters are made of them."""

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "params": {name: p.to(self.compute_dtype).float() for name, p in state["params"].items()}}


def from_the_first_again(data: Dataset, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the batches of a run that was resumed after 6 steps and has lost its place in the data."""
    for number, batch in enumerate(batches(data, batch_size)):
        if number == STEPS // 2:
            yield from batches(data, batch_size)
        yield batch


@RECIPE.plants("run", batches=from_the_first_again, task={"batch_size": 32})
class DataPositionLost(Scratch):
    """The harness is wrong, and the backend is right."""


# Writing into what is lent: the network with the initial weights, and the batches.


@RECIPE.plants("network written")
class TrainsTheNetworkItWasGiven(Amp):
    """The copy is forgotten, so that all backends of the process train one network."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.model = model
        self.optimizer = task.optimizer.make(model.parameters())


@RECIPE.plants("batch written")
class HalvesTheBatchInPlace(Amp):
    """Each time that a sample is served it is half as large as before."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5), y)


@RECIPE.plants("batch written")
class RoundsTheBatchInPlace(Scratch):
    """Rounding again changes nothing, so that every step after the first is right by itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.copy_((3 * x).to(self.compute_dtype) / 3)
        return super().forward(x, y)
