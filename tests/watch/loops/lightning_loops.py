"""Lightning's Fabric, and its Trainer."""

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision as TrainerMixedPrecision
from torch import Tensor, nn
from torch.optim import Adadelta, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from watch.loops.base import Loop, published
from watch.loops.networks import mlp


class Digits(nn.Module):
    """The network of the MNIST example, smaller: two convolutions, pooling, dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(400, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logarithms of probabilities ``(batch, 10)`` of images ``(batch, 1, 14, 14)``."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


@published
class FabricLoop(Loop):
    """Fabric's example on digits, with Adadelta. In fp16 its precision is given a scaler for a CPU."""

    name = "Lightning Fabric"
    where = (
        "https://github.com/Lightning-AI/pytorch-lightning/blob/master/examples/fabric/image_classifier/train_fabric.py"
    )
    clip_norm: float | None = 1.0
    rows, batches = 16, 3

    def __init__(self, precision: str, seed: int = 0) -> None:
        super().__init__(precision, seed)
        if precision == "fp16":
            self.fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", self.scaler))
        else:
            self.fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)

    def make_model(self) -> nn.Module:
        return Digits()

    def make_optimizer(self) -> Optimizer:
        return Adadelta(self.model.parameters(), lr=1.0)

    def batch(self) -> tuple[Tensor, Tensor]:
        target = self.integers(10, self.rows)
        return self.normal(self.rows, 1, 14, 14) + 0.3 * target.view(-1, 1, 1, 1), target

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(output, target)

    def clip(self) -> None:
        if self.clip_norm is not None:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.clip_norm)

    def step(self) -> None:
        self.optimizer.step()

    def train(self, updates: int) -> None:
        schedule = StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.model.train()
        for number in range(updates):
            x, target = self.batch()
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(x), target)
            self.fabric.backward(loss)
            self.clip()
            self.step()
            if (number + 1) % self.batches == 0:
                schedule.step()
                self.evaluate()
                self.model.train()

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            x, target = self.batch()
            return self.loss_fn(self.model(x), target).item()

    @property
    def trained(self) -> nn.Module:
        model: nn.Module = self.model.module
        return model


class Classifier(LightningModule):
    """The module that Lightning's Trainer trains, with the optimizer and the schedule of the loop."""

    def __init__(self, loop: "LightningTrainer") -> None:
        super().__init__()
        self.net = mlp(32, 64, 64, 10)
        self.__dict__["loop"] = loop  # not a part of the module's state

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, target = batch
        loss: Tensor = self.__dict__["loop"].loss_fn(self(x), target)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        x, target = batch
        self.log("validation", F.cross_entropy(self(x), target))

    def configure_optimizers(self) -> Any:
        optimizer: Optimizer = self.__dict__["loop"].optimizer
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, step_size=1, gamma=0.9)}


@published
class LightningTrainer(Loop):
    """Lightning's Trainer, which in bf16 runs forward and backward in a closure of the optimizer's step."""

    name = "Lightning Trainer"
    where = "https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/trainer/trainer.py"
    micro_batches = 2
    clip_norm: float | None = 0.5
    rows, batches = 16, 6

    def make_model(self) -> nn.Module:
        return Classifier(self)

    def make_optimizer(self) -> Optimizer:
        return Adam(self.model.parameters(), lr=1e-3)

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def data(self) -> list[tuple[Tensor, Tensor]]:
        target = self.integers(10, self.rows * self.batches)
        x = self.normal(len(target), 32) + F.one_hot(target, 32)
        return list(zip(x, target, strict=True))

    def train(self, updates: int) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fp16 = {"plugins": TrainerMixedPrecision("16-mixed", "cpu", self.scaler)}
            precision: dict[str, Any] = fp16 if self.precision == "fp16" else {"precision": "bf16-mixed"}
            trainer = Trainer(
                accelerator="cpu", devices=1, max_steps=updates,
                accumulate_grad_batches=self.micro_batches, gradient_clip_val=self.clip_norm, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                num_sanity_val_steps=0, **precision,
            )  # fmt: skip
            data = self.data()
            loader = DataLoader(data, self.rows)  # type: ignore[arg-type]
            trainer.fit(self.model, loader, DataLoader(data[: self.rows], self.rows))  # type: ignore[arg-type]
