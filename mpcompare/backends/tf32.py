"""FP32 whose matrix products round their operands to TF32: what a GPU gains without any mixed precision."""

from mpcompare.backends.fp32 import Fp32
from mpcompare.contract import BackendUnavailable
from mpcompare.loss_scale import LossScale
from mpcompare.tasks import mlp


class Tf32(Fp32):
    """The program of ``fp32``, line for line; the harness allows TF32 where the precision is ``tf32``."""

    PRECISIONS = ("tf32",)

    def __init__(self, params: mlp.Params, task: mlp.Task, precision: str, loss_scale: LossScale, engine: str) -> None:
        device = params["W1"].device
        if device.type != "cuda":
            raise BackendUnavailable(f"backend=tf32 needs a CUDA GPU, this run is on {device.type}")
        super().__init__(params, task, precision, loss_scale, engine)
