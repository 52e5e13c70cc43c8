"""Real bugs of the third draw: accumulation, optimizers, their groups, and losses; and a clipping and a momentum that
look wrong and are right."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from planted.real.clip import OwnNorm
from planted.real.registry import CORRECT, Theme
from planted.real.second_draw_settings import MLP_MOMENTUM_65536
from planted.real.settings import LLAMA, MLP_ADAMW, MLP_CLIP
from planted.real.third_draw_settings import (
    BRANCHES,
    GPT_NO_DECAY,
    GPT_TIED,
    MASKED,
    MASKED_ACCUMULATE,
    MASKED_SMOOTHED,
    MLP_TWO_RATES,
    SMOOTHING,
)
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.groups import Group
from mpcompare.tasks.losses import MaskedCrossEntropy
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Params, Task

ACCUMULATION, OPTIMIZER = Theme("accumulation", draw=3), Theme("optimizer", draw=3)
LOSS, RIGHT = Theme("loss", draw=3), Theme(CORRECT, draw=3)

BY_NAMES = "transformers#4360, unsloth-zoo#684, mt-dnn#37"  # further threads on groups that are made by names
RATES = "DeepSpeed#7969, pytorch-cosine-annealing-with-warmup#14"  # and on rates of groups


@ACCUMULATION.plants(
    "meta-pytorch/torchtune/pull/1875", MASKED_ACCUMULATE, "bf16", fair="accumulation, loss", also="open-instruct#1161"
)
class MeanOfMeans(Amp):
    """Each micro-batch's loss is the mean over its own tokens, and divided by the number of micro-batches, whatever the
    number of its tokens."""

    def backward(self) -> None:
        self.share = None
        super().backward()


@OPTIMIZER.plants("ml-explore/mlx/pull/87", MLP_MOMENTUM_65536, "bf16", fair="momentum, moments, optimizer")
class GradientsDampened(Amp):
    """Momentum takes up ``1 - momentum`` times the gradient, and nothing says so."""

    def step(self, lr: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["dampening"] = group["momentum"]
            for p in group["params"]:
                self.optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        super().step(lr)


@OPTIMIZER.plants("databricks/flashoptim/issues/2", MLP_ADAMW, "bf16", fair="moments, optimizer, rounding")
class MomentsThroughBf16(MasterWeights):
    """The fused kernel rounds moments to the dtype of the weights, bf16, before it stores them in fp32."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        for state in self.optimizer.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind].copy_(state[kind].to(self.compute_dtype))


@OPTIMIZER.plants(
    "tensorflow/swift-apis/issues/421",
    BRANCHES,
    "bf16",
    fair="unused parameter, moments, optimizer",
    also="pytorch#28294",
)
class UnusedHaveZeros(MasterWeights):
    """A parameter that is not used has a gradient of 0, and Adam moves it by its momentum."""

    def unscale(self) -> None:
        for name in self.params:
            if self.masters[name].grad is None:
                self.masters[name].grad = torch.zeros_like(self.masters[name])
        super().unscale()


HEAD = "output.weight"


def without_head(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if name != HEAD}


@OPTIMIZER.plants(
    "paiml/entrenar/issues/314", GPT_TIED, "bf16", fair="gradient missing, forward pass, later steps, optimizer"
)
class HeadUpdatedApart(Amp):
    """Embedding and last layer are tied, but the second is a copy: each has its own gradient, its own moments and its
    own update, and they are different from then on. The weights that are shown are those of the embedding."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.output: Any = self.model.get_submodule("output")
        self.output.weight = nn.Parameter(self.output.weight.detach().clone())
        self.optimizer = task.optimizer.make(self.model.named_parameters())

    def master_params(self) -> Params:
        return without_head(super().master_params())

    def grads(self) -> Params:
        return without_head(super().grads())

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "optimizer": {kind: without_head(named) for kind, named in state["optimizer"].items()}}

    def load_state_dict(self, state: State) -> None:
        tied = {kind: dict(named) for kind, named in state["optimizer"].items()}
        for named in tied.values():
            if "embedding.weight" in named:
                named[HEAD] = named["embedding.weight"]
        super().load_state_dict({**state, "optimizer": tied})
        with torch.no_grad():
            self.output.weight.copy_(state["params"]["embedding.weight"])


@OPTIMIZER.plants(
    "deepspeedai/DeepSpeedExamples/pull/755", GPT_NO_DECAY, "bf16", fair="parameter groups, weight decay", also=BY_NAMES
)
class NormsDecay(Amp):
    """Parameters without decay are found by their names, "bias" and "LayerNorm.weight": gains of norms that have
    another name decay."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        groups = (Group(kind="biases", weight_decay=0.0),)
        task = replace(task, optimizer=replace(task.optimizer, groups=groups))  # type: ignore[type-var]
        super().__init__(model, task, precision, loss_scale)


@OPTIMIZER.plants(
    "deepspeedai/DeepSpeed/pull/8171", MLP_TWO_RATES, "bf16", fair="parameter groups, schedule, optimizer", also=RATES
)
class RateOfTheFirstGroup(Amp):
    """The warm-up takes the learning rate of the first group for that of all groups."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        first, *others = self.optimizer.param_groups
        for group in others:
            group["lr_factor"] = first["lr_factor"]


class OwnLoss(Amp):
    """``amp`` with a loss of its own."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, replace(task, loss=self.own_loss), precision, loss_scale)

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


@LOSS.plants("pytorch/pytorch/issues/73205", MASKED_SMOOTHED, "bf16", fair="loss")
class SmoothsWhatIsLeftOut(OwnLoss):
    """The uniform part of smoothed labels is the mean over all tokens, and those that are left out count in it."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        logits = output.float().flatten(0, -2)
        uniform = -logits.log_softmax(-1).mean(-1)
        return (1 - SMOOTHING) * F.cross_entropy(logits, y.flatten()) + SMOOTHING * uniform.mean()


@LOSS.plants("tracel-ai/burn/issues/5568", MASKED, "bf16", fair="loss", also="Fast-LLM#426, miles#2796")
class DividesByAllTokens(OwnLoss):
    """Tokens that are left out have a loss of 0, and count in the number by which the sum is divided."""

    @staticmethod
    def own_loss(output: Tensor, y: Tensor) -> Tensor:
        total = F.cross_entropy(
            output.float().flatten(0, -2), y.flatten(), ignore_index=MaskedCrossEntropy.ignored, reduction="sum"
        )
        return total / y.numel()


class _CrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of 16-bit logits; backward computes them once more, in fp32, and takes the logarithm of
    the sum from forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, hidden: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        rounded = logits.float()
        log_sum = rounded.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(hidden, weight, log_sum, y)
        return (log_sum - rounded.gather(-1, y[..., None])).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        hidden, weight, log_sum, y = ctx.saved_tensors
        probabilities = (hidden.float() @ weight.float().t() - log_sum).exp()
        difference = probabilities - F.one_hot(y, probabilities.shape[-1])
        return (difference * (grad / y.numel())).to(hidden.dtype), None, None, None


@LOSS.plants("marin-community/marin/pull/8217", LLAMA, "bf16", fair="loss, input gradient, precision")
class BackwardOfOtherLogits(Amp):
    """Forward takes the loss of bf16 logits, backward its gradient at fp32 ones: the probabilities do not add up
    to 1."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        model: Any = self.model
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            h = model.embedding(x)
            for block in model.blocks:
                h = block(h)
            h = model.norm(h).to(self.compute_dtype)
            logits = model.output(h)
        weight = model.output.weight.detach().to(self.compute_dtype)
        self.loss = _CrossEntropy.apply(logits, h.detach(), weight, y)
        self.observed = {"activations": logits.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


@RIGHT.plants("pytorch/pytorch/pull/133406", MLP_CLIP, "bf16")
class NormOfOneVector(OwnNorm):
    """The norm is that of all gradients laid out as one vector, and not that of their norms."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))


@RIGHT.plants("pytorch/pytorch/issues/44917", MLP_MOMENTUM_65536, "bf16", also="pytorch#1196, pytorch#94615")
class RateInsideTheMomentum(MasterWeights):
    """Momentum adds up steps, ``v = momentum v + lr g; w = w - v``, as in other frameworks: with a constant learning
    rate that is the same. The momentum that is shown is v over the rate."""

    def step(self, lr: float | Tensor) -> None:
        self.skipped = self.found_inf
        optimizer = self.task.optimizer
        assert isinstance(optimizer, Sgd)
        if self.skipped:
            return
        with torch.no_grad():
            for name, p in self.params.items():
                master = self.masters[name]
                assert master.grad is not None
                remembered = self.optimizer.state[master]
                velocity = remembered.get("momentum_buffer", torch.zeros_like(master)) * lr
                velocity.mul_(optimizer.momentum).add_(master.grad * lr)
                master.sub_(velocity)
                remembered["momentum_buffer"] = velocity / lr
                p.copy_(master)
