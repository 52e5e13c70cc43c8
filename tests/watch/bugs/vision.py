"""Bugs in torchvision's loop."""

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from watch.bugs.optimizers import DecayAfterTheMomentum
from watch.bugs.registry import bug
from watch.loops.vision import Torchvision


@bug("pytorch#88474", "fp16", fair="running statistics, buffers")
class StatisticsKeepNan(Torchvision):
    """The third batch overflows in fp16. Its step is skipped, and the running statistics of batch norm stay NaN."""

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        image, target = super().batch(number)
        if number == 2:
            image[0, 0, 8, 8] = 1e6
        return image, target


@bug("pytorch#13801", "bf16", fair="weight decay, momentum, moments")
class DecaysLate(Torchvision):
    """SGD adds the decay to the momentum's update, and not to the gradient that it takes up."""

    def make_optimizer(self) -> Optimizer:
        groups = super().make_optimizer().param_groups
        return DecayAfterTheMomentum(groups, lr=0.05, momentum=self.momentum, weight_decay=self.weight_decay)


@bug("pytorch#96136", "bf16", fair="running statistics, buffers")
class StatisticsTwice(Torchvision):
    """Activations are recomputed in backward, and running statistics are updated once more."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        right = model.forward
        model.forward = lambda x: checkpoint(right, x, use_reentrant=False)  # type: ignore[method-assign]
        return model


@bug("vision#4874", "fp16", fair="optimizer, momentum, moments, skip")
class StepsTwice(Torchvision):
    """With amp the optimizer takes its step after the scaler has let it take one."""

    clip_norm = None

    def step(self, loss: Tensor) -> None:
        super().step(loss)
        self.optimizer.step()
