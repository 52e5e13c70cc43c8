"""Hugging Face Accelerate: ``Accelerator(mixed_precision="fp16")``, ``prepare``, ``accelerator.backward``.

https://huggingface.co/docs/accelerate/usage_guides/training_zoo

Accelerate calls the forward under autocast and casts what it returns to fp32; the loss is computed outside. On a CPU
``mixed_precision="fp16"`` computes in fp32, without a scaler and without a word (1.15.0). ``optimizer.step()`` is the
scaler's step and update in one.

Changed here: the scaler has the settings that were asked for (``GradScalerKwargs``); by default they are its own.
Gradients are unscaled in a phase of their own, and clipped by torch's function, which ``accelerator.clip_grad_norm_``
calls after it has unscaled them. Micro-batches are counted by the task and not by ``accelerator.accumulate``.
"""

import torch
from torch import nn

from mpcompare.backends.amp import grad_scaler
from mpcompare.backends.peers.library import SetUp, library
from mpcompare.backends.torch_model import gradient_dtype, require_kernels, share_of_step
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mpcompare.tasks.task import Task


class AccelerateRow(SetUp):
    """A module and an optimizer that Accelerate has prepared."""

    PRECISIONS = ("fp16", "bf16")

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        if type(loss_scale) is not (DynamicLossScale if precision == "fp16" else NoLossScale):
            raise InputError("loss_scale", loss_scale.name, f"Accelerate has none but auto in precision={precision}")
        accelerate = library("accelerate", "accelerate")
        device = next(model.parameters()).device.type
        require_kernels(model, device, precision, "accelerate")
        grad_scaler(loss_scale, device)  # refuses what GradScaler does not have
        super().__init__(model, task)
        library("accelerate.state", "accelerate").AcceleratorState._reset_state()  # one process, several precisions
        settings = []
        if isinstance(loss_scale, DynamicLossScale):
            settings.append(accelerate.utils.GradScalerKwargs(**loss_scale.of_grad_scaler))
        self.accelerator = accelerate.Accelerator(
            mixed_precision=precision, cpu=device == "cpu", kwargs_handlers=settings
        )
        self.network, self.stepper = self.accelerator.prepare(self.model, self.optimizer)
        self.scaler = self.accelerator.scaler or torch.amp.GradScaler(device, enabled=False)

    def backward(self) -> None:
        self.accelerator.backward(share_of_step(self.task, self.loss, self.share))
        self.observed["gradients"] = gradient_dtype(self.model)

    def unscale(self) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients(self.stepper)
