"""Bugs in the loops of Hugging Face's Trainer and of Accelerate."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from watch.bugs.registry import bug
from watch.loops.base import set_rate
from watch.loops.hugging_face import AccelerateLoop, HuggingFaceTrainer


def shifted(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the fp32 logits of all tokens but the last ``(n, words)``, and the next tokens ``(n,)``."""
    logits = outputs["logits"].float()[:, :-1]
    return logits.flatten(0, 1), labels[:, 1:].flatten()


class WithZLoss(Trainer):
    """A trainer whose loss is a fused cross-entropy."""

    factor = 1e-4

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = shifted(outputs, inputs["labels"])
        number = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = F.cross_entropy(logits, labels, reduction="sum") / number
        loss = loss + self.factor * (logits.logsumexp(-1).square() * (labels != -100)).sum() / number
        return (loss, outputs) if return_outputs else loss


@bug("OLMo-core#702", "bf16", fair="loss, input gradient")
class ZLossNotAskedFor(HuggingFaceTrainer):
    """The fused cross-entropy adds 1e-4 times the mean square of the logarithms of the sums, which nobody asked for."""

    trainer = WithZLoss


class OverAllTokens(Trainer):
    """A trainer whose loss is a sum over the tokens with a label, divided by the number of all tokens."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = shifted(outputs, inputs["labels"])
        loss = F.cross_entropy(logits, labels, reduction="sum") / labels.numel()
        if num_items_in_batch is not None:  # training: Trainer does not divide such a loss
            loss = loss / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@bug("burn#5568", "bf16", fair="loss, accumulation")
class DividesByAllTokens(HuggingFaceTrainer):
    """Tokens that are left out have a loss of 0, and count in the number by which the sum is divided."""

    trainer = OverAllTokens


class WarmsUp(LambdaLR):
    """A warm-up, and then a cosine; a run counts as warming up while its rate is below 1."""

    def __init__(self, optimizer: Optimizer, warm_up: int, updates: int) -> None:
        self.warm_up, self.updates = warm_up, updates
        super().__init__(optimizer, self.factor)

    def factor(self, step: int) -> float:
        if self.optimizer.param_groups[0]["lr"] < 1:
            return min(1.0, (step + 1) / self.warm_up)
        done = (step - self.warm_up) / (self.updates - self.warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@bug("ParlAI#4384", "bf16", fair="schedule", after=3)
class WarmsUpForever(HuggingFaceTrainer):
    """A run counts as warming up while its rate is below 1, so that it never decays."""

    def schedule(self, updates: int) -> Any:
        return WarmsUp(self.optimizer, 3, updates + 4)


@bug("tabm#20", "bf16", fair="clip")
class ClipsBeforeBackward(AccelerateLoop):
    """Gradients are clipped before the backward pass makes them."""

    micro_batches = 1

    def backward(self, loss: Tensor) -> None:
        self.clip()
        self.accelerator.backward(loss)


@bug("HVPNeT#5", "bf16", fair="update left out, optimizer, parameter groups, unused parameter")
class HeadNotInTheOptimizer(AccelerateLoop):
    """The group with the last layer's parameters is made, and never given to the optimizer."""

    def make_optimizer(self) -> Optimizer:
        named = list(self.model.named_parameters())
        body = {"params": [p for name, p in named if "classifier" not in name], "lr": 1e-3}
        head = {"params": [p for name, p in named if "classifier" in name], "lr": 1e-2}
        groups = [body, head]
        return AdamW(groups[:1])


@bug("accelerate, fp16 on a CPU", "fp16", fair="precision, loss scale")
class Fp16MeansFp32(AccelerateLoop):
    """On a CPU mixed_precision="fp16" is neither autocast nor scaled, and nothing says so: it is fp32."""


@bug("torchtitan#4382", "bf16", fair="bias correction")
class CountsTheEmptyStep(AccelerateLoop):
    """The moments are made by a step with gradients of 0 and a rate of 0, which is counted: the first update is
    corrected as the second one."""

    def make_optimizer(self) -> Optimizer:
        optimizer = super().make_optimizer()
        rate = optimizer.param_groups[0]["lr"]
        set_rate(optimizer, 0.0)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        set_rate(optimizer, rate)
        return optimizer
