"""Real bugs of the fourth draw: clipping, accumulation, optimizers and a loss; and a loss and a Nesterov momentum
that look wrong and are right."""

from typing import Any

import torch
from planted.real.fourth_draw_settings import MLP_ADAMW_CLIP, MLP_MOMENTUM_COSINE
from planted.real.registry import CORRECT, Theme
from planted.real.settings import GPT_ADAMW, LLAMA, MLP_ADAMW, MLP_ADAMW_LONG, MLP_DECAY
from planted.real.third_draw_settings import MLP_NESTEROV
from planted.real.third_draw_step import OwnLoss
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.real_bugs import OwnAdamW, OwnRule
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Params, Task

CLIP, ACCUMULATION = Theme("clip", draw=4), Theme("accumulation", draw=4)
OPTIMIZER, LOSS, RIGHT = Theme("optimizer", draw=4), Theme("loss", draw=4), Theme(CORRECT, draw=4)


def norm_of(tensors: list[Tensor]) -> Tensor:
    """Returns the norm of all tensors together."""
    return torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors]))


@CLIP.plants("sanchit-gandhi/seq2seq-speech/pull/7", MLP_ADAMW_CLIP, "bf16", fair="clip, optimizer")
class ClipsTheUpdate(Amp):
    """The update of the optimizer is clipped, and not the gradient that it is made from."""

    def clip(self) -> None:
        self.grad_norm = norm_of(list(self.grads().values()))

    def step(self, lr: float | Tensor) -> None:
        before = {name: p.clone() for name, p in self.master_params().items()}
        super().step(lr)
        after = self.master_params()
        norm, largest = norm_of([after[name] - p for name, p in before.items()]), self.task.clip_norm or 0.0
        if norm > largest:
            for name, p in before.items():
                after[name].copy_(p.lerp(after[name], float(largest / (norm + 1e-6))))


@ACCUMULATION.plants("karpathy/llm.c/pull/548", GPT_ADAMW, "bf16", fair="accumulation, gradient scaled")
class DepositsTwiceAtFirst(Amp):
    """A backward pass for a comparison comes before the loop, and gradients are cleared after the loop's own: those of
    the first step are there twice."""

    first = True

    def backward(self) -> None:
        super().backward()
        if self.first:
            for g in self.grads().values():
                g.mul_(2)

    def update(self) -> None:
        super().update()
        self.first = False


@OPTIMIZER.plants(
    "zjunlp/HVPNeT/issues/5",
    GPT_ADAMW,
    "bf16",
    fair="update left out, optimizer, parameter groups, unused parameter",
)
class HeadNotInTheOptimizer(Amp):
    """The group with the last layer's parameters is made, and never given to the optimizer."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        given = [(name, p) for name, p in self.model.named_parameters() if not name.startswith("output.")]
        self.optimizer = task.optimizer.make(given)

    def update(self) -> None:
        super().update()
        self.model.zero_grad(set_to_none=True)


@OPTIMIZER.plants("modern-fortran/neural-fortran/issues/152", MLP_ADAMW, "bf16", fair="weight decay")
class DecayWithoutTheRate(OwnAdamW):
    """The decay of AdamW is multiplied by its own factor alone, and not by the learning rate."""

    def decay(self, w: Tensor, lr: float) -> None:
        w.mul_(1 - self.adam.weight_decay)


class OwnSgd(OwnRule):
    """``master_weights`` with a momentum of its own."""

    @property
    def sgd(self) -> Any:
        return self.task.optimizer

    def rule(self, w: Tensor, g: Tensor, state: Params, lr: float) -> None:
        self.move(w, g, state["momentum_buffer"], lr)

    def move(self, w: Tensor, g: Tensor, v: Tensor, lr: float) -> None:
        """Updates a weight and its momentum ``v``, which is 0 at first."""
        raise NotImplementedError


@OPTIMIZER.plants("PaddlePaddle/Paddle/pull/12231", MLP_NESTEROV, "bf16", fair="momentum, optimizer")
class MomentumWithTheOtherSign(OwnSgd):
    """Nesterov's update adds the part of the momentum that it should subtract: ``w - lr g + lr momentum v``."""

    def move(self, w: Tensor, g: Tensor, v: Tensor, lr: float) -> None:
        g = g + self.sgd.weight_decay * w
        v.mul_(self.sgd.momentum).add_(g)
        w.sub_(lr * g).add_(lr * self.sgd.momentum * v)


@OPTIMIZER.plants("pytorch/pytorch/pull/13801", MLP_DECAY, "bf16", fair="weight decay, momentum, moments")
class DecayAfterTheMomentum(OwnSgd):
    """SGD of the C++ interface adds the decay to the momentum's update, and not to the gradient that it takes up."""

    def move(self, w: Tensor, g: Tensor, v: Tensor, lr: float) -> None:
        v.mul_(self.sgd.momentum).add_(g)
        w.sub_(lr * (v + self.sgd.weight_decay * w))


@OPTIMIZER.plants(
    "paiml/aprender/pull/2190", MLP_MOMENTUM_COSINE, "bf16", fair="momentum, moments, schedule, optimizer"
)
class OldRatesInTheMomentum(OwnSgd):
    """Momentum adds up steps, ``v = momentum v + lr g``, so that it goes on with the rates of earlier steps when the
    schedule has changed the rate. The momentum that is shown is v over the rate of its step."""

    rate: float | None = None  # the learning rate of the step before

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        self.rate = self.rate if self.skipped else float(lr)

    def move(self, w: Tensor, g: Tensor, v: Tensor, lr: float) -> None:
        v.mul_(self.sgd.momentum * (self.rate or lr) / lr).add_(g)
        w.sub_(lr * v)

    def state_dict(self) -> State:
        state = super().state_dict()
        known = {} if self.rate is None else {"rate": self.rate}
        return {**state, "loss_scale": {**state["loss_scale"], **known}}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.rate = state["loss_scale"].get("rate")


class _CrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of 16-bit logits, whose gradient is written in their place: at the true class a number of
    16 bits is read back, and changed."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(logits, y)
        return torch.nn.functional.cross_entropy(logits.float(), y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, y = ctx.saved_tensors
        stored = (logits.float().softmax(-1) / len(y)).to(logits.dtype)
        at = torch.arange(len(y)), y
        stored[at] = (stored[at].float() - 1 / len(y)).to(logits.dtype)
        return stored * grad.to(logits.dtype), None


@LOSS.plants(
    "linkedin/Liger-Kernel/pull/1329", MLP_ADAMW_LONG, "bf16", fair="loss, input gradient, precision, rounding"
)
class TrueClassReadBack(OwnLoss):
    """The gradient at the true class, p - 1, is computed from a p that was rounded to bf16: where p is nearly 1, little
    is left of it."""

    own_loss = staticmethod(_CrossEntropy.apply)


class _CrossEntropyAgain(torch.autograd.Function):
    """The mean cross-entropy of 16-bit logits, which keeps the logarithms of the sums, and takes the softmax in
    backward, in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor) -> Tensor:
        log_sum = logits.float().logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, y, log_sum)
        return (log_sum[..., 0] - logits.float().gather(-1, y[..., None])[..., 0]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, y, log_sum = ctx.saved_tensors
        difference = (logits.float() - log_sum).exp()
        difference.scatter_add_(-1, y[..., None], torch.full_like(log_sum, -1.0))
        return (difference * (grad / y.numel())).to(logits.dtype), None


@RIGHT.plants("NVIDIA/TransformerEngine/pull/3273", LLAMA, "bf16")
class SoftmaxInBackward(OwnLoss):
    """The fused cross-entropy keeps statistics of the logits and computes its gradient from them in backward, in fp32:
    it is rounded once."""

    own_loss = staticmethod(_CrossEntropyAgain.apply)


@RIGHT.plants("pluskid/Mocha.jl/pull/47", MLP_NESTEROV, "bf16")
class NesterovInItsOtherForm(OwnSgd):
    """Nesterov's update is written with steps, ``v' = momentum v - lr g; w + (1 + momentum) v' - momentum v``: with a
    constant learning rate that is the same. The momentum that is shown is -v over the rate."""

    def move(self, w: Tensor, g: Tensor, v: Tensor, lr: float) -> None:
        before, momentum = v * -lr, self.sgd.momentum
        after = momentum * before - lr * (g + self.sgd.weight_decay * w)
        w.add_((1 + momentum) * after - momentum * before)
        v.copy_(after / -lr)
