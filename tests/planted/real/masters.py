"""Real bugs of fp32 master weights."""

import torch
from planted.real.registry import Theme
from planted.real.settings import GPT_ADAMW, MLP_ADAMW
from planted.real.wholly import All16Bits
from torch import Tensor

from mpcompare.backends.amp import Amp

MASTERS = Theme("masters")


@MASTERS.plants(
    "vllm-project/speculators/pull/765",
    GPT_ADAMW,
    "bf16",
    fair="no master weights, precision",
    also="speculators#668, flame#47, Model-Optimizer#2322",
)
class TrainsInBf16(All16Bits):
    """All weights are bf16, without masters: the gains of the norms, which begin at 1, never move."""


@MASTERS.plants("huggingface/trl/issues/7268", GPT_ADAMW, "bf16", fair="no master weights")
class OneVectorInBf16(Amp):
    """The magnitude vector of QDoRA is cast to bf16 with the adapter, and its updates are rounded away. Here it is the
    gain of the last norm."""

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        with torch.no_grad():
            gain = self.model.get_parameter("norm.weight")
            gain.copy_(gain.bfloat16())


@MASTERS.plants(
    "huggingface/accelerate/issues/3979",
    MLP_ADAMW,
    "bf16",
    fair="no master weights, precision",
    also="axolotl#3894, optax#1552",
)
class UpcastWithoutEffect(All16Bits):
    """FSDP2 casts a local variable to fp32, not the parameter: weights and moments stay in bf16."""
