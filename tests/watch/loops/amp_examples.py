"""PyTorch's recipe of automatic mixed precision, and its examples: clipping, accumulation, two networks."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from watch.loops.base import Loop, published
from watch.loops.networks import mlp


class Regression(Loop):
    """An MLP that learns another MLP's outputs."""

    width, rows = 48, 32

    def make_model(self) -> nn.Module:
        return mlp(self.width, self.width, self.width, self.width)

    def make_optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.05)

    def batch(self) -> tuple[Tensor, Tensor]:
        x = self.normal(self.rows, self.width)
        return x, x.roll(1, 1) * x.sign()

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        with self.autocast():
            return self.loss_fn(self.model(x), target)


@published
class AmpRecipe(Regression):
    """The recipe: autocast, a scaler, and gradients that are cleared in the end."""

    name = "AMP recipe"
    where = "https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html"

    def train(self, updates: int) -> None:
        for _ in range(updates):
            x, target = self.batch()
            loss = self.forward(x, target)
            self.backward(loss)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()


@published
class AmpClipping(Regression):
    """The example of clipping, with momentum and decay."""

    name = "AMP example, clipping"
    where = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping"
    clip_norm = 0.1

    def make_optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def train(self, updates: int) -> None:
        for _ in range(updates):
            self.optimizer.zero_grad()
            x, target = self.batch()
            loss = self.forward(x, target)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()


@published
class AmpAccumulation(Regression):
    """The example of accumulation, with Adam."""

    name = "AMP example, accumulation"
    where = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
    micro_batches = 4

    def make_optimizer(self) -> Optimizer:
        return Adam(self.model.parameters(), lr=1e-3)

    def train(self, updates: int) -> None:
        for number in range(updates * self.micro_batches):
            x, target = self.batch()
            loss = self.forward(x, target) / self.micro_batches
            self.scaler.scale(loss).backward()
            if (number + 1) % self.micro_batches == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()


@published
class AmpTwoNetworks(Regression):
    """The example of two networks, two losses and two optimizers under one scaler; the first network is watched."""

    name = "AMP example, two networks"
    where = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#working-with-multiple-models-losses-and-optimizers"

    def __init__(self, precision: str, seed: int = 0) -> None:
        super().__init__(precision, seed)
        self.other = mlp(self.width, self.width, self.width)
        self.other_optimizer = Adam(self.other.parameters(), lr=1e-3)

    def train(self, updates: int) -> None:
        optimizers: Iterable[Optimizer] = (self.optimizer, self.other_optimizer)
        for _ in range(updates):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x, target = self.batch()
            with self.autocast():
                first, second = self.model(x), self.other(x)
                loss0 = self.loss_fn(2 * first + 3 * second, target)
                loss1 = self.loss_fn(3 * first - 5 * second, target)
            self.scaler.scale(loss0).backward(retain_graph=True)
            self.scaler.scale(loss1).backward()
            self.scaler.unscale_(self.optimizer)
            for optimizer in optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
