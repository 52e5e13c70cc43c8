"""``torch.autocast`` with the loss scale in a few lines of our own, in the place of ``GradScaler``."""

import copy

import torch

from mpcompare.backends.torch_model import TorchModel, clip_gradients, gradient_dtype, set_lr, share_of_step
from mpcompare.loss_scale import load_state, state_of


class MyAmp(TorchModel):
    PRECISIONS = ("fp16", "bf16")
    IDLE_PHASES = ()

    def __init__(self, model, task, precision, loss_scale):
        self.task, self.scaling, self.skipped = task, loss_scale, False
        self.device_type = next(model.parameters()).device.type
        self.compute_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
        self.model = copy.deepcopy(model)  # others are made from the same one
        self.optimizer = task.optimizer.make(self.model.named_parameters())

    def forward(self, x, y):
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(x)
            loss = self.task.loss_fn(output, y)
        return self.observe(output, loss)

    def backward(self):
        (share_of_step(self.task, self.loss, self.share) * self.scaling.scale).backward()
        self.observed["gradients"] = gradient_dtype(self.model)

    def unscale(self):
        grads = self.grads().values()
        self.found_inf = self.scaling.found_inf(grads)
        for g in grads:
            g.mul_(self.scaling.inv_scale)

    def clip(self):
        self.grad_norm = clip_gradients(self.task, self.model.parameters())

    def step(self, lr):
        self.skipped = self.found_inf
        if not self.skipped:
            set_lr(self.optimizer, lr)
            self.optimizer.step()

    def update(self):
        self.scaling.update(self.found_inf)
        self.optimizer.zero_grad()

    def loss_scale(self):
        return self.scaling.scale

    def memory_model(self):
        return {}

    def state_dict(self):
        return {**super().state_dict(), "loss_scale": state_of(self.scaling)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        load_state(self.scaling, state["loss_scale"])
