"""``amp`` as one CUDA graph: ``torch.autocast``, ``GradScaler`` and a fused optimizer, captured once and replayed.

``GradScaler.step`` reads ``found_inf`` on the host to skip a step, unless the optimizer is fused: that skips on the
device, where a graph can. https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.memory_models.autograd import captured_peak
from mpcompare.backends.torch_model import share_of_step
from mpcompare.contract import Batches, State
from mpcompare.loss_scale import LossScale
from mpcompare.native import graph
from mpcompare.tasks.batch import each, tensors_of
from mpcompare.tasks.losses import shares
from mpcompare.tasks.task import Task


class AmpGraph(Amp):
    """The phases of ``amp`` in one piece. They read copies of micro-batches and learning rate, which always lie at the
    same places."""

    name = "amp_graph"
    called_module = None  # a graph that is replayed calls no hooks
    warmup_steps = graph.WARMUP
    peak_of = captured_peak

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        device = next(model.parameters()).device
        graph.require_cuda(device, "backend=amp_graph")
        super().__init__(model, task, precision, loss_scale)
        self.optimizer = task.optimizer.make(self.model.named_parameters(), fused=True)
        for group in self.optimizer.param_groups:
            if "capturable" in group:  # fused kernels are capturable, and Adam wants it said
                group["capturable"] = True
        self.optimizer._warned_capturable_if_run_uncaptured = True  # the steps before the capture run without one
        self.lr = torch.full((), task.optimizer.lr, device=device)
        self.shapes: list[torch.Size] = []
        self.batches: Batches = []  # copies, made when the shapes are known
        self.graph = graph.StepGraph(self._whole_step)

    def _whole_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # not at the end: until here grads() shows them
        total: Any = 0.0
        parts = shares(self.task.loss_fn, [y for _, y in self.batches])
        for number, (x, y) in enumerate(self.batches):
            self.share = parts[number] if parts else None
            total = total + share_of_step(self.task, self.forward(x, y), self.share)
            self.backward()
        self.unscale()
        self.clip()
        self.step(self.lr)  # in the graph, where the multiples of parameter groups are computed, too
        self.scaler.update(self.static_scale)
        self.loss = total  # without a gradient, whose graph would keep autograd on this step's stream

    def train_step(self, batches: Batches, lr: float | Tensor) -> Tensor:
        shapes = [t.shape for x, y in batches for t in (*tensors_of(x), *tensors_of(y))]
        if self.shapes != shapes:
            self.shapes = shapes
            self.batches = [(each(torch.empty_like, x), each(torch.empty_like, y)) for x, y in batches]
            self.graph = graph.StepGraph(self._whole_step)  # a captured one reads the old copies
        for (static_x, static_y), (x, y) in zip(self.batches, batches, strict=True):
            each(Tensor.copy_, static_x, x)
            each(Tensor.copy_, static_y, y)
        self.lr.fill_(lr)
        self.graph()
        return self.loss

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.graph = graph.StepGraph(self._whole_step)  # the captured one updates the old momentum
