"""Real bugs of the second draw: clipping, accumulation and optimizers."""

import torch
from planted.real.clip import OwnNorm
from planted.real.optimizer import DecayNotScaled
from planted.real.registry import Theme
from planted.real.second_draw_settings import MLP_ADAM_DECAY, MLP_MOMENTUM_65536, MLP_PLAIN_DECAY
from planted.real.settings import MLP_ACCUMULATE, MLP_ADAM, MLP_ADAMW, MLP_CLIP, MLP_COSINE, MLP_DECAY
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.real_bugs import OwnAdamW
from mpcompare.backends.torch_model import set_lr
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task

CLIP, ACCUMULATION = Theme("clip", draw=2), Theme("accumulation", draw=2)
OPTIMIZER = Theme("optimizer", draw=2)


@CLIP.plants("paiml/entrenar/issues/311", MLP_CLIP, "bf16", fair="clip")
class SquaresTheSquare(OwnNorm):
    """A tensor's norm is the sum of its squares already, and is squared again when the norms are added."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([g.square().sum().square() for g in grads]).sum().sqrt()


@CLIP.plants("HomebrewML/HeavyBall/issues/67", MLP_CLIP, "bf16", fair="clip")
class ClipsByTheRootMean(OwnNorm):
    """What is called clipping by the L2 norm of all gradients takes the root of their mean square."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        return torch.cat([g.flatten() for g in grads]).square().mean().sqrt()


@CLIP.plants("huggingface/transformers/pull/614", MLP_CLIP, "bf16", fair="clip", also="MemN2N-tensorflow#19, rlevo#183")
class ClipsEachGroup(MasterWeights):
    """The gradients of each group of parameters are clipped by their own norm. Here the groups are weights, which
    decay in BERT, and biases, which do not."""

    def clip(self) -> None:
        self.grad_norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in self.grads().values()]))
        masters = self.masters.values()
        for group in ([m for m in masters if m.dim() > 1], [m for m in masters if m.dim() == 1]):
            nn.utils.clip_grad_norm_(group, self.task.clip_norm or 0.0)


@ACCUMULATION.plants(
    "bytetriper/RAE/issues/67", MLP_ACCUMULATE, "bf16", fair="accumulation", also="starVLA#395, Fast-LLM#550"
)
class ClearsEachMicroBatch(Amp):
    """Gradients are cleared before each micro-batch, so that only the last one counts."""

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        super().backward()


@ACCUMULATION.plants("AMD-AGI/Primus/pull/1046", MLP_ACCUMULATE, "bf16", fair="accumulation")
class AddsTheFirstMicroBatch(MasterWeights):
    """The gradients of weights of linear layers are added to the sum in the first micro-batch alone: a flag says that
    they are there already. Those of biases take another way."""

    def backward(self) -> None:
        first = {name: g.clone() for name, g in self.grads().items() if g.dim() > 1}
        super().backward()
        for name, g in first.items():
            self.masters[name].grad = g


@ACCUMULATION.plants("pytorch/torchtitan/pull/1732", MLP_ACCUMULATE, "bf16", fair="accumulation")
class DividesTheSumSoFar(Amp):
    """A pipeline divides all gradients by the number of its parts when they are done, and with them the sum of those
    before. Here the micro-batches are two times two parts."""

    done = 0

    def backward(self) -> None:
        self.loss = self.loss * 2
        super().backward()
        self.done += 1
        if self.done % 2 == 0:
            for g in self.grads().values():
                g.div_(2)

    def update(self) -> None:
        super().update()
        self.done = 0


@OPTIMIZER.plants("chainer/chainer/issues/7597", MLP_DECAY, "fp16", fair="weight decay")
class DecayScaled(DecayNotScaled):
    """The decay is multiplied by the loss scale, as if gradients were scaled still; they have been divided by it."""

    def factor(self) -> float:
        return self.scaling.scale


@OPTIMIZER.plants("flagos-ai/FlagGems/issues/4988", MLP_ADAM_DECAY, "bf16", fair="weight decay", also="FlagGems#4989")
class AdamAsAdamW(OwnAdamW):
    """Fused Adam decays the weights as AdamW does."""


@OPTIMIZER.plants(
    "tinygrad/tinygrad/pull/4297", MLP_COSINE, "fp16", fair="optimizer, schedule", also="Paddle#34316, Paddle#44840"
)
class RateInFp16(Amp):
    """The learning rate has the default dtype, which is fp16 in training with fp16."""

    def step(self, lr: float | Tensor) -> None:
        super().step(float(torch.tensor(float(lr), dtype=self.compute_dtype)))


@OPTIMIZER.plants("kozistr/pytorch_optimizer/issues/480", MLP_ADAMW, "bf16", fair="eps", also="pytorch_optimizer#481")
class EpsAfterTheRoot(OwnAdamW):
    """eps is added to 1 / sqrt(v), which is inf where v is 0. There it is AdamP's, here that of AdamW."""

    def move(self, w: Tensor, m: Tensor, v: Tensor, updates: int, lr: float) -> None:
        beta1, beta2 = self.adam.betas
        inverse = v.div(1 - beta2**updates).rsqrt_().add_(self.adam.eps)
        w.addcmul_(m, inverse, value=-lr / (1 - beta1**updates))


@OPTIMIZER.plants("FluxML/Flux.jl/pull/448", MLP_ADAM, "bf16", fair="eps")
class EpsInTheRoot(OwnAdamW):
    """eps is added to v, and not to its root: 1e-8 does what 1e-4 would do beside the root."""

    def rule(self, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> None:
        beta1, beta2 = self.adam.betas
        m, v, updates = self.means(g, state)
        w.addcdiv_(m, v.div(1 - beta2**updates).add_(self.adam.eps).sqrt_(), value=-lr / (1 - beta1**updates))


@OPTIMIZER.plants("ml-explore/mlx/pull/473", MLP_PLAIN_DECAY, "bf16", fair="weight decay", also="mlx#440")
class NoDecayWithoutMomentum(Amp):
    """SGD without momentum returns before it comes to the decay."""

    def step(self, lr: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0
        super().step(lr)


@OPTIMIZER.plants("pytorch/torchtitan/pull/4382", MLP_ADAMW, "bf16", fair="bias correction")
class CountsTheEmptyStep(Amp):
    """The moments are made by a step with gradients of 0 and a rate of 0, which is counted: the first update is
    corrected as the second one."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        set_lr(self.optimizer, 0.0)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@OPTIMIZER.plants("pytorch/vision/pull/4874", MLP_MOMENTUM_65536, "fp16", fair="optimizer, momentum, moments, skip")
class StepsTwice(Amp):
    """With amp the optimizer takes its step after the scaler has let it take one."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        self.optimizer.step()
