"""DeepSpeed: ``deepspeed.initialize(model, optimizer, config={"bf16": {"enabled": True}})``, in one process, ZeRO 0.

https://www.deepspeed.ai/docs/config-json/

The module is cast to bf16, and the optimizer updates fp32 masters. Gradients are clipped to a norm of 1 where the
configuration says nothing of clipping, and a step whose gradients overflow is skipped in bf16, too (0.19.8). The first
engine of a machine compiles an operator, which takes a minute and a C++ compiler.

Changed here: the gradients are the ones that the optimizer gets, after DeepSpeed has clipped them; a hook keeps them
past the step. The process group is made without a launcher. There is no fp16: DeepSpeed refuses it on a CPU.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.layer_dtypes.modules import layer_dtypes_of_step
from mpcompare.backends.peers.library import join_alone, library
from mpcompare.backends.torch_model import TorchModel, copy_into, gradient_dtype, in_fp32, set_lr
from mpcompare.contract import BackendUnavailable, Batches, ModuleDtypes, State
from mpcompare.errors import InputError
from mpcompare.loss_scale import LossScale
from mpcompare.promises import Promises
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.groups import refuse_groups
from mpcompare.tasks.losses import shares
from mpcompare.tasks.task import Params, Task, buffers_of

DEFAULT_CLIP_NORM = 1.0  # GRADIENT_CLIPPING_DEFAULT in DeepSpeed


class DeepSpeedRow(TorchModel):
    """A DeepSpeed engine in bf16."""

    PRECISIONS = ("bf16",)

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        if loss_scale.scales:
            raise InputError("loss_scale", loss_scale.name, "DeepSpeed has none in bf16: expected one of auto, none")
        if task.clip_norm is not None and task.clip_norm_type != 2:
            raise BackendUnavailable("backend=deepspeed clips by the 2-norm only (task.clip_norm_type)")
        refuse_groups(task.optimizer, "backend=deepspeed")
        device = next(model.parameters()).device
        for name, value in {"DS_ACCELERATOR": device.type, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)  # as a launcher does
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed: Any = library("deepspeed", "deepspeed")
        join_alone(device)
        deepspeed.utils.logger.setLevel(logging.ERROR)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": task.micro_batch_size,
            "gradient_accumulation_steps": task.accumulate,
            "bf16": {"enabled": True},
        }
        default = DEFAULT_CLIP_NORM if task.clip_norm is None else None
        self.promises = Promises(clip_norm=default, skips_without_scale=True)
        if task.clip_norm is not None:
            config["gradient_clipping"] = task.clip_norm
        self.task, self.model = task, copy_of(model)
        self.optimizer = task.optimizer.make(p for p in self.model.parameters() if p.requires_grad)
        self.network, self.wrapped, _, _ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        named = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.masters: dict[str, Any] = dict(zip(named, self.wrapped.fp32_groups[0], strict=True))
        self.optimizer.register_step_pre_hook(self._keep_gradients)
        self.shown: Params = {}
        self.skipped = False
        self.grad_norm: float | None = None  # type: ignore[assignment]  # the engine returns no tensor

    def _keep_gradients(self, *_: object) -> None:
        self.shown = {name: master.grad for name, master in self.masters.items()}

    def train_step(self, batches: Batches, lr: float | Tensor) -> Tensor:
        set_lr(self.optimizer, lr)
        self.shown, total = {}, torch.zeros(())
        equal = torch.full((), 1 / len(batches))
        parts = shares(self.task.loss_fn, [y for _, y in batches]) or [equal] * len(batches)
        for (x, y), part in zip(batches, parts, strict=True):
            output = self.network(x.to(torch.bfloat16) if x.is_floating_point() else x)
            loss = self.task.loss_fn(output.float(), y)
            # backward() divides by the number of micro-batches.
            self.network.backward(loss if part is equal else loss * part * len(batches))
            self.observed = {"activations": output.dtype, "loss": loss.dtype, "gradients": gradient_dtype(self.model)}
            self.network.step()  # an update after the last micro-batch
            total = total + loss.detach() * part
        self.skipped = bool(self.wrapped.overflow)
        self.grad_norm = float(self.network.get_global_grad_norm())
        return total

    # The harness asks for the following outside of the step.

    def master_params(self) -> Params:
        frozen = {name: p.detach().float() for name, p in self.model.named_parameters() if name not in self.masters}
        return {**{name: master.detach() for name, master in self.masters.items()}, **frozen}

    def buffers(self) -> Params:
        return in_fp32(buffers_of(self.model))

    def grads(self) -> Params:
        return self.shown

    def loss_scale(self) -> float:
        return float(self.wrapped.loss_scale)

    def updated_params(self) -> Mapping[str, nn.Parameter]:
        return self.masters

    def module_dtypes(self, x: Tensor, y: Tensor) -> ModuleDtypes:
        return layer_dtypes_of_step(self, self.model, self.masters, [(x, y)] * self.task.accumulate)

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        copy_into({name: master.detach() for name, master in self.masters.items()}, state["params"])
