"""Right loops with parts of published libraries: none has a defect, and all that can be seen is seen."""

import contextlib
import copy
import functools

import pytest
import torch
from support.marks import diagonal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpcompare


class Norm(nn.Module):
    """A norm that computes in fp32, whatever it is given."""

    calls = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        Norm.calls += 1
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """Layers with casts between them."""

    def __init__(self, norms: int = 1) -> None:
        super().__init__()
        self.norms, self.up, self.down = nn.Sequential(*map(Norm, [16] * norms)), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.up(self.norms(x)).float()
        return x + self.down((h * h.sigmoid()).to(x.dtype))


class Recomputed(nn.Module):
    """Blocks that backward computes once more, unless ``reentrant`` is None."""

    def __init__(self, block: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.block, self.last, self.reentrant = nn.Linear(8, 16), block, nn.Linear(16, 5), reentrant

    def forward(self, x):
        h = self.first(x)
        h = self.block(h) if self.reentrant is None else checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.last(h)


def watched(model, autocast):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        x, y = torch.randn(16, 8), torch.randint(5, (16,))
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        Norm.calls = 0
    return seen


@pytest.mark.slow
@diagonal(reentrant=[False, True], autocast=[False, True])
def test_casts_of_a_block_that_is_recomputed_are_widened(reentrant, autocast):
    torch.manual_seed(0)
    seen = watched(Recomputed(Block(), reentrant), autocast)
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)
    assert all(seen.sight.layers.values()), str(seen)


@pytest.mark.slow
def test_a_replay_recomputes_a_block_once():
    counts = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        watched(Recomputed(Block(norms=6), reentrant), autocast=False)
        counts.append(Norm.calls)
    assert 0 < counts[1] <= 2 * counts[0]


class Policy(nn.Module):
    """A policy that keeps the distribution of its latest actions, and gives a method in the place of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.log_std = nn.Linear(8, 16), nn.Linear(16, 2), nn.Parameter(torch.zeros(2))

    def log_prob(self, observations, actions):
        self.distribution = torch.distributions.Normal(self.mean(self.body(observations).tanh()), self.log_std.exp())
        return self.distribution.log_prob(actions).sum(-1)


@pytest.mark.slow
def test_a_policy_may_keep_its_distribution():
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            loss = -model.log_prob(torch.randn(16, 8), torch.randn(16, 2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)
    assert all(seen.sight.parameters.values()), str(seen)


@pytest.mark.slow
def test_a_loss_may_write_into_a_view():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # the loss of Barlow Twins
            a, b = model(torch.randn(32, 8)), model(torch.randn(32, 8))
            correlations = torch.mm(a.T, b).div_(32)
            others = correlations.flatten()[:-1].view(3, 5)[:, 1:].flatten()
            loss = torch.diagonal(correlations).add_(-1).pow_(2).sum() + 0.1 * others.pow_(2).sum()
        loss.backward()
        optimizer.step()
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3])
def test_a_norm_of_two_numbers_passes_down_roundings(width):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(8, width), nn.Linear(8, width), nn.LayerNorm(width)
            self.last = nn.Linear(width, 5)

        def forward(self, x):
            return self.last(self.norm(self.a(x) + self.b(x)).softmax(-1))

    torch.manual_seed(0)
    seen = watched(Normed(), autocast=False)
    assert seen.defects == [], str(seen)


def test_a_norm_of_one_number_passes_down_its_eps():
    torch.manual_seed(0)
    seen = watched(nn.Sequential(nn.Linear(8, 1), nn.RMSNorm(1), nn.Linear(1, 5)), autocast=False)
    assert seen.defects == [], str(seen)


@diagonal(adds=[False, True], norm=[nn.InstanceNorm1d(16), nn.GroupNorm(16, 16), nn.BatchNorm1d(16)])
def test_a_norm_in_16_bits_keeps_its_statistics_so(norm, adds):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv1d(8, 16, 1), copy.deepcopy(norm), nn.Linear(16, 5)

        def forward(self, x):
            h = self.first(x)
            normed = self.norm(h)
            return self.last((h + normed if adds else normed).relu().mean(-1))

    torch.manual_seed(0)
    model = Normed().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    numbers = 1 if isinstance(norm, nn.BatchNorm1d) else 2  # numbers of two images, or of one
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        x, y = torch.randn(2, 8, numbers), torch.randint(5, (2,))
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
    assert [d for d in seen.defects if d.cause != "no master weights"] == [], str(seen)


class Recursive(nn.Module):
    """A network that returns the loss of a batch, and calls its own forward for that."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, given):
        if isinstance(given, dict):
            return F.cross_entropy(self.forward(given["x"]).float(), given["y"])
        return self.last(self.body(given).relu())


def test_forward_may_call_itself():
    torch.manual_seed(0)
    model = Recursive()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model({"x": torch.randn(16, 8), "y": torch.randint(5, (16,))})
        loss.backward()
        optimizer.step()
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)
    assert all(seen.sight.layers.values()), str(seen)


@pytest.mark.slow
@pytest.mark.parametrize("enters", [False, True])
def test_a_library_may_wrap_forward(enters):
    """The wrapper returns the loss in the place of the network's output, or enters autocast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
    forward = model.forward

    @functools.wraps(forward)
    def with_loss(x, y):
        return F.cross_entropy(forward(x).float(), y)

    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(with_loss) if enters else with_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        model(torch.randn(16, 8), torch.randint(5, (16,))).backward()
        optimizer.step()
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)
    assert all(seen.sight.layers.values()), str(seen)
    assert seen.facts["precision"] == ("bf16" if enters else "fp32")


@pytest.mark.slow
def test_a_loss_may_normalize_rows_in_16_bits():
    """In the loss of MoCo, normalize passes down a rest of two terms, which it rounds."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64))
    bank = F.normalize(torch.randn(64, 256), dim=0).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.randn(32, 8)
            z = F.normalize(model(x), dim=1)
            with torch.no_grad():
                key = F.normalize(model(x + 0.1 * torch.randn(32, 8)), dim=1)
            logits = torch.cat([torch.einsum("nc,nc->n", z, key)[:, None], torch.einsum("nc,ck->nk", z, bank)], dim=1)
            loss = F.cross_entropy(logits / 0.5, torch.zeros(32, dtype=torch.long))
        loss.backward()
        optimizer.step()
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)


class Sparse(nn.Module):
    """A layer that trains some elements of its weight alone, as SHiRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8), requires_grad=False)
        self.values = nn.Parameter(torch.randn(20))
        self.places = torch.stack([torch.arange(20) % 16, torch.arange(20) % 8])

    def forward(self, x):
        return F.linear(
            x,
            self.weight + torch.sparse_coo_tensor(self.places, self.values, self.weight.shape, check_invariants=False),
        )


def test_a_layer_may_add_a_sparse_tensor_to_its_weight():
    torch.manual_seed(0)
    seen = watched(nn.Sequential(Sparse(), nn.GELU(), nn.Linear(16, 5)), autocast=True)
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)
    assert all(seen.sight.parameters.values()), str(seen)


class Momentum(nn.Module):
    """A network whose outputs are compared with keys of a momentum encoder, and with earlier keys in a queue."""

    def __init__(self, format: torch.dtype) -> None:
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32)) for _ in range(2))
        self.key.requires_grad_(False)
        self.format = format
        self.register_buffer("queue", F.normalize(torch.randn(64, 32), dim=1).to(format))

    def forward(self, x):
        with torch.no_grad():
            keys = F.normalize(self.key(x + 0.1), dim=1).to(self.format)
        rows = torch.cat([keys, self.queue])
        self.queue = rows[:64].clone()
        z = F.normalize(self.query(x), dim=1)
        return z @ rows.to(z.dtype).T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "autocast"), [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True)]
)
def test_a_queue_of_keys_may_have_another_format(format, autocast):
    torch.manual_seed(0)
    model = Momentum(format)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(torch.randn(16, 8)) / 0.2, torch.arange(16))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_hook_may_be_on_while_a_loop_trains_alone(after):
    """Noise is added to embeddings (NEFTune), by a hook that is put on and taken off within the block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def noisy(module, args, output):
        return output + torch.zeros_like(output).uniform_(-1, 1)

    def before(module, args):
        return (args[0] + torch.zeros_like(args[0]).uniform_(-1, 1),)

    with mpcompare.watch(model, optimizer, steps=1) as seen:
        handle = model[0].register_forward_hook(noisy) if after else model[1].register_forward_pre_hook(before)
        words = torch.randint(32, (8, 6))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(words).float().flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        handle.remove()
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("of", ["layers", "network"])
def test_hooks_may_add_noise_to_weights_and_take_it_away(of, autocast):
    """Backward has the noise in the copies that autocast makes, and no noise in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
    before = {}

    def noisy(module, args):
        for p in module.parameters():
            before[p] = p.detach().clone()
            p.data.add_(torch.randn_like(p))

    def quiet(module, args, output):
        for p in module.parameters():
            p.data.copy_(before[p])

    for module in [model] if of == "network" else [model[0], model[2]]:
        module.register_forward_pre_hook(noisy)
        module.register_forward_hook(quiet)
    seen = watched(model, autocast)
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)


def test_a_network_may_keep_the_handle_of_a_hook():
    """Networks of transformers do so: their embeddings require gradients for a checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 32))
    model[0].requires_grad_(False)
    model.handle = model[0].register_forward_hook(lambda module, args, output: output.requires_grad_())
    optimizer = torch.optim.AdamW(model[1:].parameters(), lr=1e-3)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        words = torch.randint(32, (8, 6))
        F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
    assert [seen.defects, seen.not_examined] == [[], []], str(seen)
    assert len(model[0]._forward_hooks) == 1
