"""``mpcompare.watch``: loops that call the parts of a network, or a network on what it has returned."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.marks import slow_after
from torch import nn

import mpcompare
from mpcompare.errors import InputError
from mpcompare.testing import assert_same_training

ROWS, WIDTH = 32, 16


class Autoencoder(nn.Module):
    """A variational autoencoder, whose loop calls two of its methods."""

    def __init__(self):
        super().__init__()
        self.body, self.mean, self.logvar = (
            nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU()),
            nn.Linear(32, 4),
            nn.Linear(32, 4),
        )
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, WIDTH))
        self.gain = nn.Parameter(torch.ones(4))

    def encode(self, x):
        h = self.body(x)
        return self.mean(h) * self.gain, self.logvar(h)

    def loss(self, x):
        mean, logvar = self.encode(x)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        divergence = (1 + logvar - mean**2 - logvar.exp()).float().mean()
        return F.mse_loss(self.decoder(z).float(), x) - 0.01 * divergence


class Recurrent(nn.Module):
    """A cell that the loop calls step by step, each time with the state before."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, 24), nn.Linear(24, WIDTH)

    def loss(self, x):
        h, loss = torch.zeros(len(x), 24), torch.zeros(())
        for _ in range(3):
            h = self.cell(x, h)
            loss = loss + F.mse_loss(self.head(h).float(), x) / 3
        return loss


class ActorCritic(nn.Module):
    """Two heads on one trunk, which has a dropout."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(0.1))
        self.policy, self.value = nn.Linear(32, 4), nn.Linear(32, 1)

    def loss(self, x):
        h = self.trunk(x)
        value = self.value(h).float()[:, 0]
        gain = self.policy(h).float().log_softmax(-1)[:, 0] * (x[:, 0] - value).detach()
        return F.mse_loss(value, x[:, 0]) - gain.mean()


class Direct(nn.Module):
    """A network whose ``forward`` is called past its hooks. It multiplies by a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 32), nn.LayerNorm(32)
        self.weight = nn.Parameter(0.2 * torch.randn(WIDTH, 32))

    def forward(self, x):
        return F.linear(self.norm(F.gelu(self.first(x))), self.weight)

    def loss(self, x):
        return F.mse_loss(self.forward(x).float(), x)


class Prompt(nn.Module):
    """A part whose input depends on a parameter."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, x):
        tokens = torch.cat([self.prompt.expand(len(x), -1, -1), x[:, None]], 1)
        return F.mse_loss(self.head(self.body(tokens).mean(1)).float(), x)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(32, WIDTH)

    def loss(self, x):
        return F.mse_loss(self.head(self.backbone(x.view(-1, 1, 4, 4)).flatten(1)).float(), x)


class Unrolled(nn.Module):
    """Steps of descent whose lengths are trained, each with a correction by a network."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))
        self.lengths = nn.Parameter(torch.full((3,), 0.1))

    def loss(self, target):
        x = torch.zeros_like(target)
        for length in self.lengths:
            x = x - length * (x - target) + self.body(torch.cat([x, target], 1))
        return F.mse_loss(x.float(), target)


class Twice(nn.Sequential):
    """A network that is called on its own output."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def loss(self, x):
        return F.mse_loss(self(2 * self(x)).float(), x)


def train(network, optimizer, dtype, accumulate=1, updates=2):
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=1024)
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x = torch.randn(ROWS, WIDTH)
            with torch.autocast("cpu", dtype=dtype):
                loss = network.loss(x)
            scaler.scale(loss / accumulate).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def begun(make):
    torch.manual_seed(0)
    network = make()
    return network, torch.optim.AdamW(network.parameters(), 1e-3)


@pytest.mark.parametrize(
    ("dtype", "accumulate"), [(torch.bfloat16, 2), pytest.param(torch.float16, 1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "make", slow_after(1, [ActorCritic, Autoencoder, Recurrent, Direct, Convolutions, Prompt, Unrolled, Twice])
)
def test_the_layers_of_parts_are_seen(make, dtype, accumulate):
    network, optimizer = begun(make)
    with mpcompare.watch(network, optimizer, steps=2) as seen:
        train(network, optimizer, dtype, accumulate)
    assert seen.verdict == "no defect", str(seen)
    assert not seen.not_examined
    assert all(seen.sight.layers.values())
    few = {"body.norm1.bias", "body.norm2.bias"}  # torch sums them in 16 bits, and few numbers cancel
    assert {name for name, is_seen in seen.sight.parameters.items() if not is_seen} <= few
    assert seen.sight.resolution < 0.02
    assert seen.facts["inputs"] == ([] if make is Prompt else ["fp32"])  # its inputs are computed


@pytest.mark.slow
@pytest.mark.parametrize("make", [Recurrent, Prompt])
def test_no_bit_changes(make):
    weights = []
    for watched in (False, True):
        network, optimizer = begun(make)
        with mpcompare.watch(network, optimizer, steps=1, every=2) if watched else nullcontext():
            train(network, optimizer, torch.bfloat16, updates=5)
        weights.append([p.detach() for p in network.parameters()])
    assert all(map(torch.equal, *weights))


class Halving(torch.autograd.Function):
    """A function whose backward returns half of the right gradient."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Halved(nn.Linear):
    def forward(self, x):
        return Halving.apply(super().forward(x))


@pytest.mark.parametrize(
    ("make", "layer"),
    [pytest.param(Autoencoder, "mean", marks=pytest.mark.slow), (Convolutions, "head"), (ActorCritic, "value")],
)
def test_a_wrong_layer_of_a_part_is_named(make, layer):
    network, optimizer = begun(make)
    right = getattr(network, layer)
    setattr(network, layer, Halved(right.in_features, right.out_features))
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    with mpcompare.watch(network, optimizer, steps=1) as seen:
        train(network, optimizer, torch.bfloat16, updates=1)
    assert seen.defects
    assert all(layer in defect.sentence for defect in seen.defects), str(seen)


def adversarial(dtype=torch.bfloat16):
    """A generator, a discriminator, their optimizers, and a loop that trains both."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    discriminator = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    of_generator, of_discriminator = (torch.optim.Adam(m.parameters(), 1e-3) for m in (generator, discriminator))

    def loop(detached=True):
        for _ in range(2):
            real, noise = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 8)
            with torch.autocast("cpu", dtype=dtype):
                made = generator(noise)
                judged = discriminator(made.detach() if detached else made)
                loss = F.softplus(-discriminator(real)).mean() + F.softplus(judged).mean()
            of_discriminator.zero_grad()
            loss.backward()
            of_discriminator.step()
            with torch.autocast("cpu", dtype=dtype):
                loss = F.softplus(-discriminator(generator(noise))).mean()
            of_generator.zero_grad()
            loss.backward()
            of_generator.step()

    return {"G": generator, "D": discriminator}, {"of G": of_generator, "of D": of_discriminator}, loop


@pytest.mark.slow
@pytest.mark.parametrize("detached", [False, True])
def test_both_networks_of_an_adversarial_loop_are_seen(detached):
    networks, optimizers, loop = adversarial()
    with mpcompare.watch(networks, optimizers, steps=2) as seen:
        loop(detached)
    assert seen.verdict == "no defect", str(seen)
    assert not seen.not_examined
    assert len(seen.sight.layers) == 6
    assert all(seen.sight.layers.values())
    assert set(seen.sight.parameters) >= {"G.0.weight", "D.2.bias"}


def test_what_a_call_is_given_whose_output_is_detached_is_no_part_of_a_sum():
    torch.manual_seed(0)
    encoder, decoder, judge = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (decoder, judge)]
    with mpcompare.watch([encoder, decoder, judge], optimizers, steps=4) as seen:
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH)
            for optimizer, sign in zip(optimizers, (1, -1), strict=True):
                made = decoder(torch.tanh(encoder(x)))
                loss = sign * judge(made if sign > 0 else made.detach()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert (seen.defects, seen.not_examined) == ([], [])


def test_several_networks_have_names_and_none_is_watched_twice():
    networks, optimizers, _ = adversarial()
    watch = mpcompare.watch(list(networks.values()), list(optimizers.values()))
    assert "0.2.weight" in dict(watch.attached.network.named_parameters())
    with watch, pytest.raises(InputError, match="watch: model=Sequential: is watched already"):
        mpcompare.watch(networks["G"], optimizers["of G"]).__enter__()
    with mpcompare.watch(networks["G"], optimizers["of G"]):  # the first watch has freed them
        pass


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "watch: model=dict: expected a torch.nn.Module, or several by name"),
        ([nn.Linear(2, 2), 3], "watch: model=list: expected a torch.nn.Module, or several by name"),
        ({"a.b": nn.Linear(2, 2)}, "watch: model=a.b: module name can't contain"),
    ],
)
def test_what_is_no_network_is_refused(model, said):
    with pytest.raises(InputError, match=re.escape(said)):
        mpcompare.watch(model, torch.optim.SGD(nn.Linear(2, 2).parameters()))


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_loops_that_call_parts_are_compared(factor):
    def loop(factor):
        def run(watch):
            network, optimizer = begun(Autoencoder)
            with watch(network, optimizer):
                for _ in range(3):
                    torch.manual_seed(1)
                    optimizer.zero_grad()
                    (factor * network.loss(torch.randn(ROWS, WIDTH))).backward()
                    optimizer.step()

        return run

    with pytest.raises(AssertionError, match="gradients of") if factor != 1 else nullcontext():
        assert_same_training(loop(1.0), loop(factor), steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_a_compiled_network_among_several(eager):
    networks, optimizers, loop = adversarial()
    networks["G"].compile()
    with mpcompare.watch(networks, optimizers, steps=2, eager=eager) as seen:
        loop()
    assert seen.verdict == ("no defect" if eager else "gradients not seen"), str(seen)
    assert any(seen.sight.layers.values()) == eager
    assert any("compiled" in each for each in seen.not_examined)
