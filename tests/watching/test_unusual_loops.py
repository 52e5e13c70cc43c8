"""Right loops that do unusual things with gradients and weights: none of them has a defect."""

import copy
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from support.marks import diagonal
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import mpcompare
from mpcompare.watching.attach import alive

UPDATES = 3


def mlp(*widths):
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def cast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def batch():
    return torch.randn(32, 20), torch.randint(3, (32,))


def loss_of(model):
    x, y = batch()
    with cast():
        return F.cross_entropy(model(x).float(), y)


def is_real(scores, real):
    return F.binary_cross_entropy_with_logits(scores.float(), torch.full_like(scores.float(), real))


def train_gan(generate, discriminate, of_generator, of_discriminator):
    """The loss of the generator goes through the discriminator, whose gradients are cleared before its next update."""
    for _ in range(UPDATES):
        of_discriminator.zero_grad()
        with cast():
            fake = generate(torch.randn(32, 8))
            loss = is_real(discriminate(torch.randn(32, 20)), 1.0)
        loss.backward()
        with cast():
            loss = is_real(discriminate(fake.detach()), 0.0)
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        with cast():
            loss = is_real(discriminate(fake), 1.0)
        loss.backward()
        of_generator.step()


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = mlp(8, 32, 20), mlp(20, 32, 1)

    def forward(self, x, name):
        return self.get_submodule(name)(x)


class Teacher(nn.Module):
    """A network with a teacher that is not trained. Only the network's own ``no_grad`` says so."""

    def __init__(self):
        super().__init__()
        self.student = mlp(20, 32, 16)
        self.teacher = copy.deepcopy(self.student)

    def forward(self, x, y):
        with torch.no_grad():
            right = F.normalize(self.teacher(y), dim=-1)
        return 2 - 2 * (F.normalize(self.student(x), dim=-1) * right).sum(-1).mean()


def two_watches():
    generator, discriminator = mlp(8, 32, 20), mlp(20, 32, 1)
    models = (generator, discriminator)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    with ExitStack() as stack:
        seen = [stack.enter_context(mpcompare.watch(*each)) for each in zip(models, optimizers, strict=True)]
        train_gan(generator, discriminator, *optimizers)
    return seen


def two_optimizers():
    model = Gan()
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=1e-3) for name, part in model.named_children()}
    with mpcompare.watch(model, optimizers) as seen:
        train_gan(lambda z: model(z, "generator"), lambda x: model(x, "discriminator"), *optimizers.values())
    return [seen]


def sharpness_aware():
    """Foret et al., "Sharpness-Aware Minimization", ICLR 2021: gradients at weights that the first gradients moved."""
    model = mlp(20, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(UPDATES):
            optimizer.zero_grad()
            loss_of(model).backward()
            moves = [0.05 * F.normalize(p.grad.flatten(), dim=0).view_as(p) for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            loss_of(model).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()
    return [seen]


def steps_within_backward():
    model = mlp(20, 32, 3)
    optimizers = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():

        def arrived(_, optimizer=optimizers[name]):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(arrived)
    with mpcompare.watch(model, optimizers) as seen:
        for _ in range(UPDATES):
            loss_of(model).backward()
    return [seen]


def updates_by_hand_within_backward():
    model = mlp(20, 32, 3)

    def arrived(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(arrived)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(UPDATES):
            loss_of(model).backward()
            optimizer.step()
    assert seen.not_examined
    return [seen]


def teacher():
    model = Teacher()
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-3)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(UPDATES):
            x, _ = batch()
            optimizer.zero_grad()
            with cast():
                loss = model(x, x + 0.1 * torch.randn_like(x))
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(list(model.teacher.parameters()), list(model.student.parameters()), 0.01)
    return [seen]


@pytest.mark.parametrize(
    ("loop", "not_examined"),
    [
        (sharpness_aware, []),
        (steps_within_backward, ["gradients of an optimizer that takes its steps within backward"]),
        (updates_by_hand_within_backward, ["the gradients of 0.bias, 0.weight and 2 more, which hooks of the loop"]),
        pytest.param(two_optimizers, ["the loss goes through parameters of another optimizer"], marks=pytest.mark.slow),
        pytest.param(two_watches, [], marks=pytest.mark.slow),
        pytest.param(teacher, [], marks=pytest.mark.slow),
    ],
)
def test_a_right_loop_has_no_defect(loop, not_examined):
    torch.manual_seed(0)
    for seen in loop():
        assert seen.defects == []
        assert seen.facts["updates"] >= UPDATES
        assert all(any(why in said for why in not_examined) for said in seen.not_examined), seen.not_examined


class Remembers(nn.Module):
    """Keeps its last result, with its graph, as an attribute and as a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.state = nn.Linear(20, 20), None
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def forward(self, x):
        result = self.linear(x)
        self.state, self.last = result, result.sum()
        return result


class PassesNone(torch.autograd.Function):
    """A function that passes no gradient to its second argument."""

    @staticmethod
    def forward(ctx, x, other):
        return x + other.round()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x):
        return PassesNone.apply(self.first(x), self.second(x))


@pytest.mark.parametrize("layer", [Remembers, Second])
def test_results_that_a_network_keeps_and_gradients_that_are_none(layer):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.GELU(), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (seen.verdict, seen.not_examined) == ("no defect", []), str(seen)


class RunsOutOfMemory(torch.autograd.Function):
    """Its fourth backward stops with an error."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        RunsOutOfMemory.count += 1
        if RunsOutOfMemory.count == 4:
            raise torch.OutOfMemoryError("it stops")
        return grad


class Large(nn.Linear):
    def forward(self, x):
        return RunsOutOfMemory.apply(super().forward(x))


def begins_anew(optimizer, loss, none):
    optimizer.zero_grad(set_to_none=none)
    return 0


def goes_back_again(optimizer, loss, none):
    optimizer.zero_grad(set_to_none=none)
    loss.backward()
    return 1


def goes_on(optimizer, loss, none):
    return 1


@diagonal(2, then=[begins_anew, goes_back_again, goes_on], none=[True, False])
def test_a_backward_that_stops_with_an_error(monkeypatch, then, none):
    monkeypatch.setattr(RunsOutOfMemory, "count", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.GELU(), Large(20, 20), nn.GELU(), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mpcompare.watch(model, optimizer, steps=3) as seen:
        for _ in range(3):
            passed = 0
            while passed < 2:
                loss = loss_of(model) / 2
                try:
                    loss.backward(retain_graph=then is goes_back_again)
                    passed += 1
                except torch.OutOfMemoryError:
                    passed = then(optimizer, loss, none)
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)
    said = "a backward stopped with an error, and the loop goes on without clearing the gradients"
    why = [f"the gradients of update 2, layer by layer ({said})"] if then is goes_on else []
    assert (seen.verdict, seen.not_examined) == ("no defect", why), str(seen)
    assert seen.facts["updates"] == 3


def test_a_class_without_a_hash_is_no_obstacle():
    class Kind(type):
        def __eq__(cls, other):
            return False

        __hash__ = None  # type: ignore[assignment]

    class Strange(metaclass=Kind):
        pass

    kept, attention = [Strange()], nn.MultiheadAttention(4, 2)
    assert any(each is attention for each in alive(nn.MultiheadAttention))
    assert kept


def test_two_calls_may_have_one_weight_that_torch_keeps_of_a_parametrization():
    """The cache may also hold a weight that the loop computed first. Such layers are not examined."""

    def train(first):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
        parametrizations.weight_norm(model[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mpcompare.watch(model, optimizer, steps=1) as seen:
            with parametrize.cached():
                loss = first(model) + loss_of(model) + loss_of(model)
            (loss + loss_of(model)).backward()
            optimizer.step()
        return seen

    seen = train(lambda model: 0.0)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert str(seen).startswith("no defect in 1 update: 3 of 3 layers and 5 of 5 parameters are seen")
    seen = train(lambda model: model[0].weight.square().mean())
    assert seen.defects == []
    assert "parametrize.cached() keeps weights that were computed before" in seen.not_examined[0]
