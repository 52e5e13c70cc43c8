"""Lightning Fabric: ``Fabric(precision="16-mixed")``, ``fabric.setup``, ``fabric.backward``, ``optimizer.step``.

https://lightning.ai/docs/fabric/stable/fundamentals/precision.html

Fabric casts the inputs before the forward, and the outputs to fp32 after it. On a CPU it turns ``16-mixed`` into
``bf16-mixed``, with a warning; ``backend.plugin=true`` passes ``MixedPrecision("16-mixed", "cpu")`` instead, and gets
fp16 with a GradScaler. ``optimizer.step()`` is the scaler's step and update in one.

Changed here: the scaler has the settings that were asked for; by default they are its own. Gradients are unscaled in a
phase of their own, by the call that Fabric's plugin makes, and then clipped by the function that Fabric calls.
``fabric.clip_gradients`` would unscale them again, and raises an error where they overflow.
"""

import torch
from torch import nn

from mpcompare.backends.peers.library import SetUp, library
from mpcompare.errors import check_flag
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Task

NAMES = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


class FabricRow(SetUp):
    """A module and an optimizer that Fabric has set up. With ``plugin`` the precision is passed as a plugin, which
    Fabric takes as it is."""

    def __init__(
        self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale, plugin: bool = False
    ) -> None:
        check_flag("backend.plugin", plugin)
        super().__init__(model, task, precision, loss_scale, "Fabric")
        fabric, device = library("lightning_fabric", "fabric"), self.device_type
        name, scaler = NAMES[precision], self.scaler
        if plugin:
            plugins = library("lightning_fabric.plugins", "fabric")
            made = plugins.MixedPrecision(name, device, scaler if scaler.is_enabled() else None)
            self.library = fabric.Fabric(accelerator=device, devices=1, plugins=made)
        else:
            self.library = fabric.Fabric(accelerator=device, devices=1, precision=name)
        self.precision_plugin = self.library.strategy.precision
        if getattr(self.precision_plugin, "scaler", None) is not None:
            self.precision_plugin.scaler = scaler
        self.scaler = getattr(self.precision_plugin, "scaler", None) or torch.amp.GradScaler(device, enabled=False)
        self.network, self.stepper = self.library.setup(self.model, self.optimizer, move_to_device=False)

    def unscale(self) -> None:
        self.precision_plugin.unscale_gradients(self.optimizer)
