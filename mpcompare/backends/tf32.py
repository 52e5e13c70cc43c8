"""FP32 whose matrix products round their operands to TF32: the gain of a GPU without any mixed precision."""

from torch import nn

from mpcompare.backends.fp32 import Fp32
from mpcompare.contract import BackendUnavailable
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task


class Tf32(Fp32):
    """The program of ``fp32``, line for line; the harness allows TF32 where the precision is ``tf32``."""

    PRECISIONS = ("tf32",)

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        device = next(model.parameters()).device
        if device.type != "cuda":
            raise BackendUnavailable(f"backend=tf32 needs a CUDA GPU, this run is on {device.type}")
        super().__init__(model, task, precision, loss_scale)
