"""``amp`` as one CUDA graph: ``torch.autocast``, ``GradScaler`` and fused SGD, captured once and replayed.

``GradScaler.step`` reads ``found_inf`` on the host to skip a step, unless the optimizer is fused: that skips on the
device, where a graph can. https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import grad_scaler
from mpcompare.backends.torch_model import TorchModel, gradient_dtype
from mpcompare.contract import MemoryModel
from mpcompare.cost import memory
from mpcompare.loss_scale import LossScale, StaticLossScale
from mpcompare.native import graph
from mpcompare.precision import DTYPES
from mpcompare.tasks.task import Task


class AmpGraph(TorchModel):
    """The step of ``amp`` on a batch that always lies at the same place."""

    PRECISIONS = ("fp16", "bf16")

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        device = next(model.parameters()).device
        graph.require_cuda(device, "backend=amp_graph")
        self.task, self.precision = task, precision
        self.device_type = device.type
        self.compute_dtype = DTYPES[precision]
        self.model = copy.deepcopy(model)
        self.optimizer = task.optimizer.make(self.model.parameters(), fused=True)
        self.scaler = grad_scaler(loss_scale, self.device_type)
        # GradScaler.update() takes the next scale where it is not to choose one.
        self.static_scale = loss_scale.init_scale if type(loss_scale) is StaticLossScale else None
        self.optimizer.register_step_post_hook(self._stepped)
        self.x, self.y = torch.empty(0), torch.empty(0)  # made when the shapes of a batch are known
        self.graph = graph.StepGraph(self._whole_step)
        self.skipped: bool | Tensor = False

    def _stepped(self, *_: object) -> None:
        self.skipped = getattr(self.optimizer, "found_inf", False)  # GradScaler takes it away again after the step

    def _whole_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # not at the end: grads() shows them until the next step
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(self.x)
            loss = self.task.loss_fn(output, self.y)
        self.scaler.scale(loss).backward()
        self.observed = {"activations": output.dtype, "loss": loss.dtype, "gradients": gradient_dtype(self.model)}
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update(self.static_scale)
        self.loss = loss.detach()  # with its graph it would keep autograd on the stream of this step

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        if self.x.shape != x.shape:
            self.x, self.y = torch.empty_like(x), torch.empty_like(y)
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph()
        return self.loss

    def loss_scale(self) -> Tensor:
        return self.scaler.scale(torch.ones((), device=self.device_type))  # 1 * scale, without the wait of get_scale()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.graph = graph.StepGraph(self._whole_step)  # a captured one updates the momentum that was replaced

    def memory_model(self) -> MemoryModel:
        return memory.of_mlp(memory.amp_graph_peak, self.model, self.task, self.precision)
