"""Real bugs of optimizers."""

from typing import Any

import torch
from planted.real.registry import Theme
from planted.real.settings import (
    GPT_ADAM_UNSCALED,
    MLP_ADAM,
    MLP_ADAMW,
    MLP_ADAMW_095,
    MLP_ADAMW_EPS,
    MLP_ADAMW_LONG,
    MLP_DECAY,
)
from planted.real.wholly import All16Bits, stochastically_rounded
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.real_bugs import AdamWAsAdam, ConstantsInBf16, CountsEachTensor, EpsBeforeCorrection, OwnAdamW
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Params, Task

OPTIMIZER = Theme("optimizer")

OPTIMIZER.plants("tenstorrent/tt-metal/issues/55935", MLP_ADAMW, "bf16", fair="optimizer")(ConstantsInBf16)
OPTIMIZER.plants(
    "flashlight/flashlight/issues/143", MLP_ADAM, "bf16", fair="bias correction", also="DiffSharp#292, mlx-node#11"
)(CountsEachTensor)
OPTIMIZER.plants("huggingface/transformers/issues/35504", MLP_ADAMW_EPS, "bf16", fair="eps")(EpsBeforeCorrection)
OPTIMIZER.plants(
    "nntrainer/nntrainer/pull/3565", MLP_ADAMW, "fp16", fair="weight decay, moments", also="nntrainer#3527"
)(AdamWAsAdam)


@OPTIMIZER.plants("pytorch/ao/pull/4915", MLP_ADAMW_LONG, "bf16", fair="bias correction")
class StepsInBf16(Amp):
    """The count of updates has the default dtype: in bf16 it stops at 256, and updates stay too small."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].bfloat16()


@OPTIMIZER.plants("allenai/OLMo-core/pull/309", MLP_ADAMW_095, "bf16", fair="bias correction", also="OLMo-core#317")
class StepNeverCounted(OwnAdamW):
    """SkipStepAdamW never counts: each update is corrected as the first one, 2.2 times too large in the end."""

    def means(self, g: Tensor, state: Params) -> tuple[Tensor, Tensor, int]:
        m, v, _ = super().means(g, state)
        state["step"].zero_()
        return m, v, 1


@OPTIMIZER.plants(
    "bitsandbytes-foundation/bitsandbytes/issues/2010", MLP_ADAMW, "bf16", fair="weight decay", also="C-Optim#3"
)
class DecaysAfterTheUpdate(OwnAdamW):
    """The CUDA kernel of AdamW decays the weight after its update, so the update decays, too."""

    def rule(self, w: Tensor, g: Tensor, state: Params, lr: float) -> None:
        m, v, updates = self.means(g, state)
        self.move(w, m, v, updates, lr)
        self.decay(w, lr)


class AdamOf16Bits(All16Bits):
    """Training wholly in 16 bits, with an Adam of its own."""

    def step(self, lr: float | Tensor) -> None:
        self.skipped = False
        with torch.no_grad():
            for p in self.model.parameters():
                state = self.optimizer.state[p]
                if not state:
                    state.update(self.task.optimizer.initial_state(p))
                assert p.grad is not None
                self.rule(p, p.grad, state, float(lr))

    def rule(self, p: Tensor, g: Tensor, state: Params, lr: float) -> None:
        """Updates one tensor and what is remembered of it."""
        raise NotImplementedError


@OPTIMIZER.plants("Nerogar/OneTrainer/issues/996", MLP_ADAMW, "bf16", fair="weight decay, no master weights, precision")
class DecayRoundedAway(AdamOf16Bits):
    """Updates of bf16 weights are rounded stochastically, their decay is rounded to nearest: there is none."""

    def rule(self, p: Tensor, g: Tensor, state: Params, lr: float) -> None:
        adam: Any = self.task.optimizer
        beta1, beta2 = adam.betas
        p.mul_(1 - lr * adam.weight_decay)
        t = int(state["step"].add_(1))
        m = state["exp_avg"].lerp_(g, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v.float() / (1 - beta2**t)).sqrt() + adam.eps
        p.copy_(stochastically_rounded(p.float() - lr / (1 - beta1**t) * m.float() / denominator))


@OPTIMIZER.plants(
    "google-deepmind/optax/issues/1754",
    GPT_ADAM_UNSCALED,
    "fp16",
    fair="eps, moments, no master weights, precision",
    also="chainer#6299, TROPT#8, glide-finetune#5",
)
class EpsUnderflows(AdamOf16Bits):
    """Adam of fp16 weights computes in fp16, where eps is 0: a row of an embedding that is not used becomes 0 / 0."""

    def rule(self, p: Tensor, g: Tensor, state: Params, lr: float) -> None:
        adam: Any = self.task.optimizer
        beta1, beta2 = adam.betas
        t = int(state["step"].add_(1))
        m = state["exp_avg"].mul_(beta1).add_(g, alpha=1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * g**2)
        eps = torch.tensor(adam.eps, dtype=p.dtype)
        p.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))


@OPTIMIZER.plants("Oneflow-Inc/oneflow/pull/5960", MLP_ADAMW, "bf16", fair="weight decay, bias correction, eps")
class CorrectsTheRate(OwnAdamW):
    """The correction of the bias is part of the learning rate, and so of the decay; eps is added before it."""

    def rule(self, w: Tensor, g: Tensor, state: Params, lr: float) -> None:
        beta1, beta2 = self.adam.betas
        m, v, t = self.means(g, state)
        rate = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        w.sub_(rate * (m / (v.sqrt() + self.adam.eps) + self.adam.weight_decay * w))


@OPTIMIZER.plants("frgfm/holocron/issues/1", MLP_ADAM, "bf16", fair="bias correction, moments")
class CorrectsInPlace(OwnAdamW):
    """The mean of the gradients is corrected in place, and so corrected again in each later update. There it is
    RAdam's, here that of Adam."""

    def move(self, w: Tensor, m: Tensor, v: Tensor, updates: int, lr: float) -> None:
        beta1, beta2 = self.adam.betas
        m.div_(1 - beta1**updates)
        w.addcdiv_(m, v.div(1 - beta2**updates).sqrt_().add_(self.adam.eps), value=-lr)


@OPTIMIZER.plants("pytorch/pytorch/issues/118115", MLP_ADAM, "bf16", fair="optimizer")
class TransposedTensorNotUpdated(Amp):
    """addcdiv_ on MPS does not write to a tensor that does not lie row by row, and Adam ends with it. Here the first
    weight is such a tensor."""

    def step(self, lr: float | Tensor) -> None:
        weight = next(self.model.parameters())
        kept = weight.detach().clone()
        super().step(lr)
        with torch.no_grad():
            weight.copy_(kept)


@OPTIMIZER.plants("NVIDIA/OpenSeq2Seq/pull/127", MLP_DECAY, "fp16", fair="weight decay")
class DecayNotScaled(MasterWeights):
    """The regularization is not scaled as the loss is, and divided by the scale with it: there is hardly any."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.decay = self.optimizer.param_groups[0]["weight_decay"]
        self.optimizer.param_groups[0]["weight_decay"] = 0.0

    def step(self, lr: float | Tensor) -> None:
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.add_(master.detach(), alpha=self.decay * self.factor())
        super().step(lr)

    def factor(self) -> float:
        """Returns the factor by which the decay of the gradients, which have been divided by the scale, is off."""
        return 1 / self.scaling.scale
