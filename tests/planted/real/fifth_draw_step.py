"""Real bugs of the fifth draw outside of layers and losses: a scaler and an optimizer."""

from planted.real.registry import Theme
from planted.real.settings import MLP_ADAM, MLP_CLIP
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.real_bugs import OwnAdamW

SCALER, OPTIMIZER = Theme("scaler", draw=5), Theme("optimizer", draw=5)


@SCALER.plants(
    "huggingface/accelerate/issues/113",
    MLP_CLIP,
    "fp16",
    fair="gradient scaled, loss scale, clip",
    also="accelerate#115",
)
class UnscaledTwice(Amp):
    """Clipping unscales the gradients of a wrapped optimizer, of which the scaler does not know when the step comes:
    they are unscaled once more."""

    def step(self, lr: float | Tensor) -> None:
        for g in self.grads().values():
            g.div_(self.loss_scale())
        super().step(lr)


@OPTIMIZER.plants("karpathy/convnetjs/pull/70", MLP_ADAM, "bf16", fair="bias correction, optimizer")
class CorrectionMultiplied(OwnAdamW):
    """Both means are multiplied by what should divide them, 1 - beta^t."""

    def move(self, w: Tensor, m: Tensor, v: Tensor, updates: int, lr: float) -> None:
        beta1, beta2 = self.adam.betas
        denominator = v.mul(1 - beta2**updates).sqrt_().add_(self.adam.eps)
        w.addcdiv_(m, denominator, value=-lr * (1 - beta1**updates))
