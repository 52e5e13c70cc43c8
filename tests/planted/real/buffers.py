"""Real bugs of buffers."""

from planted.real.registry import Theme
from planted.real.settings import BATCH_NORM, ROUTED
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task

BUFFERS = Theme("buffers")


@BUFFERS.plants(
    "pytorch/pytorch/issues/88474",
    BATCH_NORM,
    "fp16",
    fair="running statistics",
    also="pytorch#90342, pytorch#115500, pytorch#96798",
)
class StatisticsKeepInf(Amp):
    """torch's own batch norm: a forward pass that overflows makes its running statistics NaN. The step is skipped, and
    they stay NaN."""


class CountsIn16Bits(Amp):
    """Float16Module casts all buffers: counts of tokens become bf16, whose spacing is 4 from 512 on."""

    buffer = "counts"

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        router = self.model.get_submodule("router")
        setattr(router, self.buffer, router.get_buffer(self.buffer).to(self.compute_dtype))


FAIR = "running statistics, buffers in 16 bits"
BUFFERS.plants("NVIDIA/Megatron-LM/pull/7081", ROUTED, "bf16", fair=FAIR)(CountsIn16Bits)


@BUFFERS.plants("NVIDIA/Megatron-LM/issues/1482", ROUTED, "bf16", fair=FAIR)
class BiasIn16Bits(CountsIn16Bits):
    """Float16Module casts the bias of the router to bf16, which is moved by 0.001 in each step."""

    buffer = "bias"
