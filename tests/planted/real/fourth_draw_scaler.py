"""Real bugs of the fourth draw: loss scaling and master weights."""

import torch
from planted.real.registry import Theme
from planted.real.settings import MLP, MLP_MOMENTUM
from planted.real.third_draw_settings import GPT_TIED
from planted.real.wholly import Rounds
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights

SCALER, MASTERS = Theme("scaler", draw=4), Theme("masters", draw=4)


@SCALER.plants("microsoft/onnxruntime/pull/4833", MLP_MOMENTUM, "fp16", fair="loss scale, skip, after a skip, overflow")
class ScaleNeverMoves(MasterWeights):
    """The trainer tells the loss scaler nothing of its steps: the scale stays as it was at first, also when gradients
    have overflowed."""

    def update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


@SCALER.plants(
    "microsoft/onnxruntime/pull/4268", MLP, "fp16", fair="loss scale, overflow, skip, after a skip, loss, precision"
)
class ScaledInFp16(MasterWeights):
    """The loss is fp16 and is multiplied by the scale in fp16, which has no 65536: the gradient of the first step is
    inf."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        super().forward(x, y)
        self.loss = self.loss.to(self.compute_dtype)
        self.observed["loss"] = self.loss.dtype
        return self.loss.detach().float()


@MASTERS.plants("openai/parameter-golf/pull/10", GPT_TIED, "bf16", fair="no master weights, precision, embedding")
class TiedEmbeddingInBf16(Rounds, Amp):
    """The embedding, which is the last layer, too, is a bf16 parameter and has bf16 moments, unlike all other
    weights."""

    tied = "embedding.weight"

    def round(self) -> None:
        weight = self.model.get_parameter(self.tied)
        moments = [t for kind, t in self.optimizer.state.get(weight, {}).items() if kind != "step"]
        with torch.no_grad():
            for tensor in (weight, *moments):
                tensor.copy_(tensor.to(self.compute_dtype))
