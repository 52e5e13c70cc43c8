"""The reference loop of torchvision: a residual network, smoothed labels, clipping, an average of the weights."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.ops._utils import split_normalization_params
from watch.loops.base import Loop, published


class Narrow(ResNet):
    """A ResNet whose layers after the first have a quarter of the channels."""

    def __init__(self, blocks: list[int], classes: int) -> None:
        super().__init__(BasicBlock, blocks, classes)
        self.fc = nn.Linear(self.inplanes, classes)

    def _make_layer(self, block: Any, planes: int, *args: Any, **rest: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 4, *args, **rest)


@published
class Torchvision(Loop):
    """references/classification of torchvision, its ``train_one_epoch`` and ``evaluate``; epochs have three batches."""

    name = "torchvision"
    where = "https://github.com/pytorch/vision/blob/main/references/classification/train.py"
    clip_norm: float | None = 1.0
    rows, classes, side = 8, 10, 32
    batches, epochs, ema_steps = 3, 10, 2
    momentum, weight_decay, norm_weight_decay = 0.9, 1e-4, 0.0

    def make_model(self) -> nn.Module:
        return Narrow([1, 1, 1, 1], self.classes)

    def make_optimizer(self) -> Optimizer:
        parts = split_normalization_params(self.model)
        decays = (self.norm_weight_decay, self.weight_decay)
        groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, decays, strict=True) if part]
        return SGD(groups, lr=0.05, momentum=self.momentum, weight_decay=self.weight_decay)

    def make_scaler(self) -> Any:
        return super().make_scaler() if self.precision == "fp16" else None

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, label_smoothing=0.1)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        target = self.integers(self.classes, self.rows)
        return self.normal(self.rows, 3, self.side, self.side) + 0.2 * target.view(-1, 1, 1, 1), target

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        with self.autocast():
            output = self.model(image)
            return self.criterion(output, target)

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            if self.clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
                self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            if self.clip_norm is not None:
                self.clip()
            self.optimizer.step()

    def train_one_epoch(self, epoch: int, batches: int, ema: AveragedModel) -> None:
        self.model.train()
        for number in range(batches):
            image, target = self.batch(epoch * self.batches + number)
            loss = self.forward(image, target)
            self.step(loss)
            if number % self.ema_steps == 0:
                ema.update_parameters(self.model)
                if epoch < 1:
                    ema.n_averaged.fill_(0)
            loss.item()

    def evaluate(self, model: nn.Module) -> float:
        model.eval()
        with torch.inference_mode():
            image, target = self.batch(-1)
            return (model(image).argmax(1) == target).float().mean().item()

    def train(self, updates: int) -> None:
        warm_up = LinearLR(self.optimizer, start_factor=0.1, total_iters=1)
        cosine = CosineAnnealingLR(self.optimizer, T_max=self.epochs - 1)
        schedule = SequentialLR(self.optimizer, [warm_up, cosine], milestones=[1])
        ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for epoch in range(-(-updates // self.batches)):
            self.train_one_epoch(epoch, min(self.batches, updates - epoch * self.batches), ema)
            schedule.step()
            self.evaluate(self.model)
            self.evaluate(ema)
        copy.deepcopy(self.model.state_dict())  # as its checkpoint
