"""Real bugs of losses."""

from dataclasses import replace

import torch
from planted.real.networks import in_bf16
from planted.real.registry import Theme
from planted.real.settings import GPT, MLP_POLICY
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task

LOSS = Theme("loss")


@LOSS.plants("OpenRLHF/OpenRLHF/pull/634", GPT, "bf16", fair="loss, precision")
class LogitsStayInBf16(Amp):
    """Log probabilities are taken of bf16 logits, in bf16, since transformers 4.46 no longer casts them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(x)
        log_probs = output.log_softmax(-1).gather(-1, y[..., None])
        self.loss = -log_probs.mean()
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach().float()


@LOSS.plants("OpenRLHF/OpenRLHF/pull/1334", MLP_POLICY, "bf16", fair="loss, forward pass")
class AdvantagesInBf16(Amp):
    """Advantages are centred in the bf16 of the rewards: [1, 1, 1, 1.0078] become [0, 0, 0, 2]."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, replace(task, loss=in_bf16), precision, loss_scale)
