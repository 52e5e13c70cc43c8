"""The training loop of timm, with its own scaler, optimizer, schedule, mixup and average of the weights."""

from typing import Any

import torch
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler, dispatch_clip_grad
from torch import Tensor, nn
from torch.optim import Optimizer
from watch.loops.base import Loop, published


class CpuMixup(Mixup):
    """Mixup whose soft labels lie on a CPU."""

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        lam = self._mix_batch(x)
        one_hot = nn.functional.one_hot(target, self.num_classes).float()
        on = 1.0 - self.label_smoothing + self.label_smoothing / self.num_classes
        soft = one_hot * (on - self.label_smoothing / self.num_classes) + self.label_smoothing / self.num_classes
        return x, soft * lam + soft.flip(0) * (1.0 - lam)


@published
class Timm(Loop):
    """``train_one_epoch`` of timm: two micro-batches an update, and one in the last update of an epoch."""

    name = "timm"
    where = "https://github.com/huggingface/pytorch-image-models/blob/main/train.py"
    micro_batches = 2
    clip_norm = 1.0
    rows, classes, side, batches = 8, 10, 16, 5
    optimizer_name = "adamw"

    def make_model(self) -> nn.Module:
        return VisionTransformer(
            img_size=self.side, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=self.classes,
            drop_path_rate=0.1, proj_drop_rate=0.1,
        )  # fmt: skip

    def make_optimizer(self) -> Optimizer:
        return create_optimizer_v2(
            self.model, opt=self.optimizer_name, lr=1e-3, weight_decay=0.05, layer_decay=0.75, foreach=False
        )

    def make_scaler(self) -> Any:
        return NativeScaler(device="cpu") if self.precision == "fp16" else None

    def batch(self) -> tuple[Tensor, Tensor]:
        target = self.integers(self.classes, self.rows)
        return self.normal(self.rows, 3, self.side, self.side) + 0.2 * target.view(-1, 1, 1, 1), target

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = SoftTargetCrossEntropy()(output, target)
        return loss

    def forward(self, x: Tensor, target: Tensor, accumulated: int) -> Tensor:
        with self.autocast():
            loss = self.loss_fn(self.model(x), target)
        return loss / accumulated

    def backward(self, loss: Tensor, need_update: bool) -> None:
        if self.scaler is not None:
            self.scaler(
                loss, self.optimizer, clip_grad=self.clip_norm, clip_mode="norm", parameters=self.model.parameters(),
                need_update=need_update,
            )  # fmt: skip
        else:
            loss.backward()
            if need_update:
                dispatch_clip_grad(self.model.parameters(), value=self.clip_norm, mode="norm")
                self.optimizer.step()

    def train(self, updates: int) -> None:
        ema = ModelEmaV3(self.model, decay=0.99)
        schedule = CosineLRScheduler(self.optimizer, t_initial=30, warmup_t=2, warmup_lr_init=1e-4, t_in_epochs=False)
        mixup = CpuMixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=self.classes)
        schedule.step_update(0)
        taken = 0
        while taken < updates:
            self.model.train()
            self.optimizer.zero_grad()
            last = self.batches % self.micro_batches or self.micro_batches
            for number in range(self.batches):
                need_update = number == self.batches - 1 or (number + 1) % self.micro_batches == 0
                accumulated = last if number >= self.batches - last else self.micro_batches
                x, target = mixup(*self.batch())
                self.backward(self.forward(x, target, accumulated), need_update)
                if not need_update:
                    continue
                self.optimizer.zero_grad()
                taken += 1
                ema.update(self.model, step=taken)
                schedule.step_update(num_updates=taken)
                if taken == updates:
                    break
            self.validate()

    def validate(self) -> float:
        self.model.eval()
        with torch.no_grad(), self.autocast():
            x, target = self.batch()
            return (self.model(x).argmax(1) == target).float().mean().item()
