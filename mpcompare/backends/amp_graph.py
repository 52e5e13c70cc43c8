"""``amp`` as one CUDA graph: ``torch.autocast``, ``GradScaler`` and a fused optimizer, captured once and replayed.

``GradScaler.step`` reads ``found_inf`` on the host to skip a step, unless the optimizer is fused: that skips on the
device, where a graph can. https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import grad_scaler
from mpcompare.backends.memory_models.autograd import captured_peak
from mpcompare.backends.torch_model import (
    TorchModel,
    clip_gradients,
    gradient_dtype,
    set_lr,
    share_of_step,
    skipped_by,
)
from mpcompare.contract import Batches, State
from mpcompare.dtypes import torch_dtype
from mpcompare.loss_scale import LossScale, StaticLossScale
from mpcompare.native import graph
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.losses import shares
from mpcompare.tasks.task import Task


class AmpGraph(TorchModel):
    """The step of ``amp``, on copies of micro-batches and learning rate that always lie at the same places."""

    PRECISIONS = ("fp16", "bf16")
    called_module = None  # a graph that is replayed calls no hooks
    warmup_steps = graph.WARMUP
    peak_of = captured_peak

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        device = next(model.parameters()).device
        graph.require_cuda(device, "backend=amp_graph")
        self.task, self.precision = task, precision
        self.device_type = device.type
        self.compute_dtype = torch_dtype(PRECISIONS[precision].storage)
        self.model = copy_of(model)
        self.optimizer = task.optimizer.make(self.model.named_parameters(), fused=True)
        self.scaler = grad_scaler(loss_scale, self.device_type)
        # A static scale is given to GradScaler.update(), which would choose one of its own.
        self.static_scale = loss_scale.init_scale if type(loss_scale) is StaticLossScale else None
        self.lr = torch.full((), task.optimizer.lr, device=device)
        self.batches: Batches = []  # copies, made when the shapes are known
        self.graph = graph.StepGraph(self._whole_step)
        self.skipped: bool | Tensor = False

    def _whole_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # not at the end: until here grads() shows them
        total: Any = 0.0
        parts = shares(self.task.loss_fn, [y for _, y in self.batches])
        for number, (x, y) in enumerate(self.batches):
            with torch.autocast(self.device_type, dtype=self.compute_dtype):
                output = self.model(x)
                loss = self.task.loss_fn(output, y)
            loss = share_of_step(self.task, loss, parts[number] if parts else None)
            self.scaler.scale(loss).backward()
            total = total + loss.detach()  # detached: its graph would keep autograd on this step's stream
        self.observed = {"activations": output.dtype, "loss": loss.dtype, "gradients": gradient_dtype(self.model)}
        self.scaler.unscale_(self.optimizer)
        self.grad_norm = clip_gradients(self.task, self.model)
        set_lr(self.optimizer, self.lr)  # in the graph, where the multiples of parameter groups are computed, too
        self.skipped = skipped_by(lambda: self.scaler.step(self.optimizer), self.optimizer)
        self.scaler.update(self.static_scale)
        self.loss = total

    def train_step(self, batches: Batches, lr: float | Tensor) -> Tensor:
        if [x.shape for x, _ in self.batches] != [x.shape for x, _ in batches]:
            self.batches = [(torch.empty_like(x), torch.empty_like(y)) for x, y in batches]
        for (static_x, static_y), (x, y) in zip(self.batches, batches, strict=True):
            static_x.copy_(x)
            static_y.copy_(y)
        self.lr.fill_(lr)
        self.graph()
        return self.loss

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.graph = graph.StepGraph(self._whole_step)  # the captured one updates the old momentum
