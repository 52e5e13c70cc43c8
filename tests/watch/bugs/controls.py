"""The loops with bugs once more, in the same form and without the bug. These loops are right, and must not be accused.

They show that a bug is not flagged for its form alone, such as an optimizer, a scaler or a loss that somebody wrote.
"""

from typing import Any

import torch
from torch.optim import Optimizer
from watch.bugs.amp_examples import SquaresInFp16, UpdatesBeforeItGoesDown
from watch.bugs.hugging_face import WithZLoss, ZLossNotAskedFor
from watch.bugs.lightning_loops import TrueClassReadBack, ValueWithoutTheFactor
from watch.bugs.nanogpt import RecomputesInFp16, UnscalesVectorsAlone, VectorsAlone
from watch.bugs.optimizers import RightAdam, RightSGD
from watch.bugs.timm_loop import FirstLayerRecomputed
from watch.loops.amp_examples import AmpAccumulation
from watch.loops.base import Loop
from watch.loops.vision import Torchvision


class OwnAdam(AmpAccumulation):
    """A right Adam that somebody wrote."""

    def make_optimizer(self) -> Optimizer:
        return RightAdam(self.model.parameters(), lr=1e-3)


class OwnSGD(Torchvision):
    """A right SGD that somebody wrote."""

    def make_optimizer(self) -> Optimizer:
        groups = super().make_optimizer().param_groups
        return RightSGD(groups, lr=0.05, momentum=self.momentum, weight_decay=self.weight_decay)


class OwnNorm(SquaresInFp16):
    """A right norm that somebody wrote, in fp32."""

    norm_dtype = torch.float32


class OwnLinear(UpdatesBeforeItGoesDown):
    """A right linear layer that somebody wrote."""

    rate = 0.0


class OwnRecomputation(RecomputesInFp16):
    """Blocks that are recomputed in the dtype in which they were computed."""

    again = torch.bfloat16


class UnscalesAll(VectorsAlone):
    """A right scaler that somebody wrote."""

    matrices_too = True


class OwnScaler(UnscalesVectorsAlone):
    """A right scaler that somebody wrote."""

    def make_scaler(self) -> Any:
        return UnscalesAll("cpu")


class FirstLayerRecomputedRight(FirstLayerRecomputed):
    """The first layer is recomputed by a checkpoint that is not reentrant."""

    reentrant = False


class PlainLoss(WithZLoss):
    """A right loss that somebody wrote."""

    factor = 0.0


class OwnLoss(ZLossNotAskedFor):
    """A right loss that somebody wrote, over unequal numbers of labels."""

    trainer = PlainLoss


class FusedLoss(TrueClassReadBack):
    """A right fused loss that somebody wrote, whose probabilities are kept in fp32."""

    kept = torch.float32


class FocalLoss(ValueWithoutTheFactor):
    """A right focal loss that somebody wrote."""

    with_factor = True


CONTROLS: tuple[tuple[type[Loop], str, int], ...] = (  # with the precision, and the updates before the watched ones
    (OwnAdam, "bf16", 0),
    (OwnSGD, "bf16", 0),
    (OwnNorm, "fp16", 2),
    (OwnLinear, "bf16", 0),
    (OwnRecomputation, "bf16", 0),
    (OwnScaler, "fp16", 0),
    (FirstLayerRecomputedRight, "bf16", 0),
    (OwnLoss, "bf16", 0),
    (FusedLoss, "bf16", 300),
    (FocalLoss, "bf16", 0),
)
