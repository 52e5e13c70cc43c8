"""``amp`` as one CUDA graph: ``torch.autocast``, ``GradScaler`` and fused SGD, captured once and replayed.

``GradScaler.step`` reads ``found_inf`` on the host to skip a step, unless the optimizer is fused: that skips on the
device, where a graph can. https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

from typing import Any

import torch
from torch import Tensor

from mpcompare.backends.amp import grad_scaler
from mpcompare.contract import DTYPES, MemoryModel, dtype_name
from mpcompare.cost import memory
from mpcompare.loss_scale import LossScale, StaticLossScale
from mpcompare.native import graph
from mpcompare.tasks import mlp


class AmpGraph:
    """The step of ``amp`` on a batch that always lies at the same place, all of it in ``forward()``."""

    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES = ("backward", "unscale", "step", "update")
    engine = "torch"

    def __init__(self, params: mlp.Params, task: mlp.Task, precision: str, loss_scale: LossScale, engine: str) -> None:
        device = params["W1"].device
        graph.require_cuda(device, "backend=amp_graph")
        self.task = task
        self.device_type = device.type
        self.compute_dtype = DTYPES[precision]
        self.model = mlp.to_module(params)
        self.weight = next(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=task.lr, momentum=task.momentum, fused=True)
        if task.momentum:  # fused SGD makes buffers of its own in the first step, and skipping that never fills them
            for p in self.model.parameters():
                self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.scaler = grad_scaler(loss_scale, self.device_type)
        # GradScaler.update() takes the next scale where it is not to choose one.
        self.static_scale = loss_scale.init_scale if type(loss_scale) is StaticLossScale else None
        self.optimizer.register_step_post_hook(self._stepped)
        self.x = torch.empty(task.batch_size, task.in_features, device=device)
        self.y = mlp.empty_targets(task, device)
        self.graph = graph.StepGraph(self._whole_step)
        self.skipped: bool | Tensor = False

    def _stepped(self, *_: object) -> None:
        self.skipped = getattr(self.optimizer, "found_inf", False)  # GradScaler takes it away again after the step

    def _whole_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # not at the end: grads() shows them until the next step
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(self.x)
            loss = mlp.loss_fn(self.task.loss, output, self.y)
        self.scaler.scale(loss).backward()
        self.observed = {"activations": output.dtype, "loss": loss.dtype}
        self.observed["gradients"] = self.weight.grad.dtype  # type: ignore[union-attr]
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update(self.static_scale)
        self.loss = loss.detach()  # with its graph it would keep autograd on the stream of this step

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph()
        return self.loss

    def backward(self) -> None:
        pass

    def unscale(self) -> None:
        pass

    def step(self) -> None:
        pass

    def update(self) -> None:
        pass

    def master_params(self) -> mlp.Params:
        return mlp.module_params(self.model)

    def grads(self) -> mlp.Params:
        return mlp.module_grads(self.model)

    def loss_scale(self) -> Tensor:
        return self.scaler.scale(torch.ones((), device=self.device_type))  # 1 * scale, without the wait of get_scale()

    def dtypes(self) -> dict[str, str]:
        state = self.optimizer.state[self.weight].get("momentum_buffer")
        optimizer = self.weight if state is None else state  # plain SGD has no state: it computes in the weight's dtype
        observed = {"params": self.weight.dtype, **self.observed, "optimizer": optimizer.dtype}
        return {name: dtype_name(dtype) for name, dtype in observed.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.graph = graph.StepGraph(self._whole_step)  # a captured one updates the momentum that was replaced

    @staticmethod
    def memory_model(task: mlp.Task, precision: str, engine: str) -> MemoryModel:
        return memory.amp_graph_peak(task, precision)
