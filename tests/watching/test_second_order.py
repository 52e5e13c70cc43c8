"""Losses that have gradients in them: penalties of gradients (WGAN-GP, R1, PyTorch's example of mixed precision),
differential equations (PINN), and steps within a loss (MAML). Gradients of these gradients are replayed, too."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from support.marks import diagonal, slow_after
from torch import nn
from torch.nn import functional as F

import mpcompare

ROWS = 32


def mlp(*widths, act=nn.Tanh):
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


class Training:
    """A loop of one network; ``plant`` is given the gradients within the loss, and the network."""

    def __init__(self, dtype, plant=lambda *given: None):
        torch.manual_seed(0)
        self.dtype, self.plant, self.model = dtype, plant, self.make()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

    def cast(self):
        return torch.autocast("cpu", dtype=self.dtype) if self.dtype is not torch.float32 else nullcontext()

    def slope(self, output, inputs):
        found = torch.autograd.grad(output, inputs, torch.ones_like(output), create_graph=True, retain_graph=True)
        self.plant(found, self.model)
        return found

    def train(self):
        torch.manual_seed(1)
        for _ in range(2):
            self.optimizer.zero_grad()
            with self.cast():
                loss = self.loss()
            loss.backward()
            self.optimizer.step()

    def watched(self):
        with mpcompare.watch(self.model, self.optimizer, steps=1) as seen:
            self.train()
        return seen


class Critic(Training):
    """Gulrajani et al., "Improved Training of Wasserstein GANs", NeurIPS 2017."""

    def make(self):
        return mlp(16, 32, 1, act=lambda: nn.LeakyReLU(0.2))

    def loss(self):
        real, fake, part = torch.randn(ROWS, 16), torch.randn(ROWS, 16), torch.rand(ROWS, 1)
        between = (part * real + (1 - part) * fake).requires_grad_(True)
        (slope,) = self.slope(self.model(between), between)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return self.model(fake).mean() - self.model(real).mean() + 10 * penalty


class Discriminator(Training):
    """R1 of Mescheder et al. (ICML 2018) on the rows of its own loss; the network has norms and ends with a sigmoid."""

    def make(self):
        head = [nn.Flatten(), nn.Linear(128, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 1), nn.Sigmoid()]
        return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2, inplace=True), *head)

    def loss(self):
        real = torch.randn(8, 3, 8, 8, requires_grad=True)
        scores = self.model(real)
        (slope,) = self.slope(scores, real)
        fakes = self.model(torch.randn(8, 3, 8, 8))
        return -(scores.float().log() + (1 - fakes.float()).log()).mean() + 5 * slope.pow(2).sum((1, 2, 3)).mean()


class Equation(Training):
    """Raissi et al., "Physics-informed neural networks", 2019: Burgers' equation."""

    def make(self):
        return mlp(2, 32, 32, 1)

    def loss(self):
        x, t = torch.rand(ROWS, 1, requires_grad=True), torch.rand(ROWS, 1, requires_grad=True)
        u = self.model(torch.cat([x, t], 1))
        u_x, u_t = self.slope(u, (x, t))
        (u_xx,) = self.slope(u_x, x)
        start = torch.rand(ROWS, 1)
        begun = self.model(torch.cat([start, torch.zeros_like(start)], 1))
        return (u_t + u * u_x - 0.01 * u_xx).square().mean() + F.mse_loss(begun.float(), torch.sin(start))


class Learner(Training):
    """Finn et al., "Model-Agnostic Meta-Learning", ICML 2017."""

    def make(self):
        return mlp(8, 32, 1)

    def loss(self):
        total = 0
        for _ in range(2):
            fast = dict(self.model.named_parameters())
            for _ in range(2):
                loss = self.loss_of(fast)
                slopes = self.slope(loss, list(fast.values()))
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
            total = total + self.loss_of(fast)
        return total

    def loss_of(self, params):
        x, y = torch.randn(ROWS, 8), torch.randn(ROWS, 1)
        return F.mse_loss(torch.func.functional_call(self.model, params, (x,)).float(), y)


class FirstOrder(Learner):
    """Its gradients within the loss are constants."""

    def slope(self, output, inputs):
        return [g.detach() for g in super().slope(output, inputs)]


class OfParameters(Training):
    """The penalty of the gradients of parameters in PyTorch's examples of mixed precision, with its loss scale."""

    def make(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return mlp(8, 32, 3)

    def train(self):
        torch.manual_seed(1)
        for _ in range(2):
            self.optimizer.zero_grad()
            with self.cast():
                loss = F.mse_loss(self.model(torch.randn(ROWS, 8)), torch.randn(ROWS, 3))
            slopes = self.slope(self.scaler.scale(loss), list(self.model.parameters()))
            with self.cast():
                norm = sum((slope / self.scaler.get_scale()).pow(2).sum() for slope in slopes).sqrt()
            self.scaler.scale(loss + norm).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


class Energies(nn.Module):
    """The energies of molecules, and the forces on their atoms, which it asks for within its forward."""

    def __init__(self):
        super().__init__()
        self.kinds, self.pairs, self.last = nn.Embedding(5, 8), mlp(1, 16, 8), mlp(8, 16, 1)

    def forward(self, kinds, places):
        places.requires_grad_()
        apart = (places[:, :, None] - places[:, None]).square().sum(-1, keepdim=True)
        own = self.kinds(kinds)
        energies = self.last(own + (self.pairs((apart + 0.1).sqrt()) * own[:, None]).sum(2)).sum((1, 2))
        (slopes,) = torch.autograd.grad(energies.sum(), places, create_graph=True)
        return energies, -slopes


class Potential(Training):
    """A network whose forces have a loss, as SchNet (Schütt et al., NeurIPS 2017)."""

    def make(self):
        return Energies()

    def loss(self):
        energies, forces = self.model(torch.randint(5, (8, 4)), torch.randn(8, 4, 3))
        self.plant([forces], self.model)
        return F.mse_loss(energies.float(), torch.randn(8)) + F.mse_loss(forces.float(), torch.randn(8, 4, 3))


LOOPS = [Critic, Discriminator, Equation, Learner, FirstOrder, OfParameters, Potential]


@diagonal(3, kind=LOOPS, dtype=[torch.float32, torch.bfloat16])
def test_gradients_of_gradients_are_seen(kind, dtype):
    watched, plain = kind(dtype), kind(dtype)
    seen = watched.watched()
    plain.train()
    assert (seen.defects, seen.not_examined) == ([], [])
    assert seen.sight.parameters.keys() == {name for name, _ in watched.model.named_parameters()}
    assert sum(seen.sight.parameters.values()) >= len(seen.sight.parameters) - 1  # a bias whose terms cancel
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))


def halve(gradients, _):
    """Halves what the gradient of the first of these gradients passes down, where no hook of a tensor is called."""
    gradients[0].grad_fn.register_prehook(lambda grads: tuple(None if g is None else g / 2 for g in grads))


@pytest.mark.parametrize("kind", slow_after(1, [Critic, Discriminator, Equation, Learner, OfParameters, Potential]))
def test_a_wrong_gradient_of_a_gradient_is_found(kind):
    assert kind(torch.float32, halve).watched().defects


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Critic, Learner])
def test_a_wrong_gradient_of_a_weight_is_found(kind):
    loop = kind(torch.bfloat16)
    weight = loop.model[0].weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: (grads[0] / 2,))
    assert "0.weight" in {defect.place for defect in loop.watched().defects}


def trains_by_backward(model, optimizer, form):
    """Gradients that can be differentiated again lie in the parameters."""
    torch.manual_seed(1)
    params = list(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(ROWS, 8)
        F.mse_loss(model(x), torch.randn(ROWS, 3)).backward(create_graph=True)
        grads = [p.grad for p in params]
        if form == "curvature":  # Yao et al., "AdaHessian", AAAI 2021
            curvatures = torch.autograd.grad(grads, params, list(map(torch.randn_like, params)))
            for p, curvature in zip(params, curvatures, strict=True):
                p.grad = p.grad.detach() / (1 + curvature.abs())
        if form == "penalty":
            sum(grad.square().sum() for grad in grads).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward. with create_graph=True")
@pytest.mark.parametrize("form", ["as it is", "curvature", "penalty"])
def test_backward_that_creates_a_graph(form):
    models = []
    for watches in (True, False):
        torch.manual_seed(0)
        model = mlp(8, 32, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mpcompare.watch(model, optimizer) if watches else nullcontext() as seen:
            trains_by_backward(model, optimizer, form)
        models.append(model)
        if watches:
            assert seen.defects == []
            assert [*seen.sight.parameters.values()] == [form != "penalty"] * 4
            why = "a loss depends on a gradient of backward(create_graph=True), which a replay does not make"
            whose = f"the gradients of update 1, 2, layer by layer ({why})"
            assert seen.not_examined == ([whose] if form == "penalty" else [])
    assert all(map(torch.equal, *(model.parameters() for model in models)))
