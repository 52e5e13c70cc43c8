"""The oracle is a step in float64 from numbers that the precision holds."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.backends import make_backend, step_to_gradients
from support.networks import DroppingGpt
from support.tasks import make_batch, make_task, mlp_of
from torch import nn

from mpcompare.loss_scale import NoLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.data.text import ALPHABET
from mpcompare.tasks.losses import cross_entropy
from mpcompare.tasks.task import params_of
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.errors import gradient_errors, micro_batches
from mpcompare.verdict.examine.layers import outputs_of
from mpcompare.verdict.examine.oracle import exact_step, oracle
from mpcompare.verdict.examine.rounding import rounding_errors
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.errors import relative_error

CPU = torch.device("cpu")
TASK = make_task(in_features=40, samples=32 * 25)


def subject_of(task, precision, batch, policy=None):
    """Returns a subject whose oracle can be asked."""
    model, scaling = task.new_model(0, CPU), policy or NoLossScale()
    return Subject(lambda *_: None, model, scaling, PRECISIONS[precision], task, lambda: iter([[batch]]))


def test_the_oracle_starts_from_the_numbers_that_the_precision_has():
    """Compared with it errors are a few roundings. Compared with unrounded operands they are several times as large."""
    batch = make_batch(TASK, CPU)
    _, grads = step_to_gradients(make_backend("scratch", TASK, "bf16", CPU), *batch)
    subject = subject_of(TASK, "bf16", batch)
    rounded, unrounded = (
        max(map(relative_error, gradient_errors(grads, oracle(subject.exact_values, precision).grads).values()))
        for precision in (PRECISIONS["bf16"], PRECISIONS["fp32"])
    )
    assert rounded < 2.0**-6
    assert unrounded > 2 * rounded


def test_subnormal_gradients_are_counted_at_the_loss_scale():
    batch = x, y = make_batch(TASK, CPU)
    network = TASK.new_model(0, CPU).bfloat16().double()
    with outputs_of(network) as outputs:
        loss = TASK.loss_fn(network(x.bfloat16().double()), y)
    dz = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(outputs.tensors.values()))]).abs()
    dz = dz[dz != 0]
    exact = oracle(subject_of(TASK, "bf16", batch).exact_values, PRECISIONS["bf16"])
    for scale in (1.0, 2.0**-6, 2.0**6):
        share = (dz * scale < 2.0**-14).double().mean().item()
        assert exact.subnormal(scale) == pytest.approx(share)
        assert 0 <= share <= 1


def test_the_noise_of_the_loss_is_what_roundings_of_the_activations_make():
    task = make_task(hidden=[64], batch_size=200)
    x, y = make_batch(task, CPU)
    exact = subject_of(task, "bf16", (x, y)).exact
    p64 = {n: p.bfloat16().double() for n, p in mlp_of(task).by_hand(params_of(task.new_model(0, CPU))).items()}
    x64, u, losses = x.bfloat16().double(), 2.0**-8, []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)

        def noisy(z, generator=generator):
            return z * (1 + u * (2 * torch.rand(z.shape, generator=generator, dtype=z.dtype) - 1))

        z = noisy((x64 @ p64["W1"] + p64["b1"]).relu())
        losses.append(task.loss_fn(noisy(z @ p64["W2"] + p64["b2"]), y).item())
    assert torch.tensor(losses).std().item() == pytest.approx(exact.loss_noise, rel=0.2)


def test_the_oracle_adds_what_its_micro_batches_make():
    task = replace(make_task(batch_size=30), accumulate=3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 20, generator=generator), torch.randint(5, (30,), generator=generator)
    model = task.new_model(0, CPU)
    exact = exact_step(model, task.loss_fn, task.micro_batches(x, y), PRECISIONS["bf16"])
    whole = exact_step(model, task.loss_fn, [(x, y)], PRECISIONS["bf16"])
    assert whole.shares == []
    assert all(torch.allclose(g, whole.grads[name], rtol=1e-12) for name, g in exact.grads.items())
    parts = [exact_step(model, task.loss_fn, [part], PRECISIONS["bf16"]).grads for part in task.micro_batches(x, y)]
    assert exact.largest == pytest.approx(max(g.abs().max().item() for part in parts for g in part.values()) / 3)
    mixed = {name: sum(c * part[name] for c, part in zip((2, 0, 1), parts, strict=True)) / 3 for name in parts[0]}
    found = micro_batches(numerics.sketch(mixed), exact.shares)
    assert found.counts == pytest.approx([2, 0, 1])
    assert found.rest < 1e-12


SHAPE = (len(ALPHABET), 8, 16, 2, 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_oracle_goes_through_checkpoints_of_both_ways(reentrant):
    """Gradients, loss noise, layers and the state of the generators are as in the network without checkpoints."""
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randint(len(ALPHABET), (4, 8), generator=generator) for _ in "xy") for _ in range(2)]
    steps = []
    for way in (None, reentrant):
        torch.manual_seed(1)
        model = DroppingGpt(SHAPE, 0.3, functions=True, reentrant=way)
        steps.append(exact_step(model, cross_entropy, batches, PRECISIONS["bf16"], count=True))
        assert all(p.grad is None for p in model.parameters())
    plain, again = steps
    assert again.loss == plain.loss
    assert all(torch.equal(g, again.grads[name]) for name, g in plain.grads.items())
    assert (again.order, again.drawn) == (plain.order, plain.drawn)
    assert len(set(plain.drawn)) == 2
    assert again.exponents == plain.exponents
    assert again.loss_noise == pytest.approx(plain.loss_noise)


def test_a_norm_without_an_eps_has_that_of_fp32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.mul_(1e-4)  # so small that the eps counts
        model[0].bias.zero_()
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    exact = exact_step(model, F.cross_entropy, [(x, y)], PRECISIONS["fp32"])
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    errors = gradient_errors({name: p.grad for name, p in model.named_parameters()}, exact.grads)
    assert max(map(relative_error, errors.values())) < 1e-5
    assert model[1].eps is None  # the network that was given stays as it was


def test_a_frozen_body_is_rounded_like_all_else():
    torch.manual_seed(0)
    free = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    frozen = copy.deepcopy(free)
    frozen[:3].requires_grad_(False)
    batch = [(torch.randn(16, 6), torch.randint(3, (16,)))]
    trained = {"4.weight", "4.bias"}
    exact, expected = (exact_step(net, F.cross_entropy, batch, PRECISIONS["bf16"]) for net in (frozen, free))
    assert (exact.loss_noise, exact.order) == (expected.loss_noise, expected.order)
    assert set(exact.grads) == trained
    found, known = (rounding_errors(net, F.cross_entropy, batch, PRECISIONS["bf16"]) for net in (frozen, free))
    assert set(found) == trained
    assert all(found[name].error == pytest.approx(known[name].error) for name in trained)
    assert not any(p.requires_grad for p in frozen[:3].parameters())


class Rotary(nn.Module):
    """Turns pairs of numbers by a table of complex numbers, and keeps the mean of the pairs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(1.0, 5.0)))
        self.register_buffer("mean", torch.ones(4, dtype=torch.complex64))

    def forward(self, x):
        pairs = torch.view_as_complex(self.linear(x).float().unflatten(-1, (4, 2)))
        self.mean.lerp_(pairs.detach().mean(0), 0.1)
        return torch.view_as_real(pairs * self.turns).flatten(-2).tanh()


def test_complex_buffers_keep_both_of_their_parts():
    torch.manual_seed(0)
    network, batch = Rotary(), (torch.randn(16, 8), torch.randn(16, 8))
    exact = exact_step(copy.deepcopy(network), F.mse_loss, [batch], PRECISIONS["fp32"])
    F.mse_loss(network(batch[0]), batch[1]).backward()
    errors = gradient_errors({name: p.grad for name, p in network.named_parameters()}, exact.grads)
    errors |= gradient_errors(dict(network.named_buffers()), exact.buffers)
    assert max(map(relative_error, errors.values())) < 1e-6
    assert exact.buffers["mean"].dtype is torch.complex128
    once = rounding_errors(Rotary(), F.mse_loss, [batch], PRECISIONS["bf16"])
    assert 1e-5 < once["mean"].error / errors["mean"].norm < 1e-3
