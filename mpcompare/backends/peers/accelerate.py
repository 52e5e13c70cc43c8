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

from mpcompare.backends.peers.library import SetUp, library
from mpcompare.loss_scale import DynamicLossScale, LossScale
from mpcompare.tasks.task import Task


class AccelerateRow(SetUp):
    """A module and an optimizer that Accelerate has prepared."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale, "Accelerate")
        accelerate = library("accelerate", "accelerate")
        library("accelerate.state", "accelerate").AcceleratorState._reset_state()  # one process, several precisions
        settings = []
        if isinstance(loss_scale, DynamicLossScale):
            settings.append(accelerate.utils.GradScalerKwargs(**loss_scale.of_grad_scaler))
        self.library = accelerate.Accelerator(
            mixed_precision=precision, cpu=self.device_type == "cpu", kwargs_handlers=settings
        )
        self.network, self.stepper = self.library.prepare(self.model, self.optimizer)
        self.scaler = self.library.scaler or torch.amp.GradScaler(self.device_type, enabled=False)

    def unscale(self) -> None:
        if self.library.scaler is not None:
            self.library.unscale_gradients(self.stepper)
