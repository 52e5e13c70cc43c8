"""Networks that get other modules, parameters or buffers within the block: adapters (LoRA), and codes that forward
replaces by averages, as a known VQ-VAE does."""

import pytest
import torch
from support.marks import diagonal
from support.unusual import Growing
from support.watched_loops import Loop
from torch import nn
from torch.nn import functional as F

import mpcompare


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Codes(nn.Module):
    """Its codes are averages, and new parameters after each forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.codes = nn.Linear(20, 8), nn.Linear(8, 20), nn.Embedding(16, 8)
        self.sums = nn.Parameter(self.codes.weight.detach().clone())

    def forward(self, x):
        z = self.inner(x)
        chosen = torch.cdist(z.float(), self.codes.weight.float()).argmin(1)
        of_each = F.one_hot(chosen, 16).float()
        q = of_each @ self.codes.weight
        self.sums = nn.Parameter(0.9 * self.sums + 0.1 * of_each.t() @ z.float())
        self.codes.weight = nn.Parameter(self.sums / self.sums.norm(dim=1, keepdim=True))
        return self.outer(z + (q - z).detach()), F.mse_loss(q.detach(), z.float())


def train(model, optimizer, dtype, loss_of, between=lambda number: None):
    for number in range(3):
        between(number)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = loss_of(model, torch.randn(32, 20))
        loss.backward()
        optimizer.step()


def halved(weight):
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: (grads[0] / 2,))
    return node


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
@diagonal(1, at=[0, 1], dtype=[torch.float32, torch.bfloat16])
def test_adapters_that_come_within_the_block_are_seen(at, wrong, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 20))
    optimizer, kept = torch.optim.AdamW(model.parameters(), 1e-3), []

    def between(number):
        if number == at:
            model[0] = Adapted(model[0])
            optimizer.add_param_group({"params": [*model[0].down.parameters(), *model[0].up.parameters()]})
            kept.append(halved(model[0].up.weight) if wrong else None)

    with mpcompare.watch(model, optimizer) as seen:
        train(model, optimizer, dtype, lambda model, x: F.mse_loss(model(x).float(), x), between)
    assert {defect.place for defect in seen.defects} == ({"0.up.weight"} if wrong else set())
    assert {"0.up.weight", "0.down.weight"} <= seen.sight.parameters.keys()
    assert len(seen.not_examined) == at
    assert all("other layers or weights since" in each for each in seen.not_examined)


def codes(dtype, watched, wrong=False):
    torch.manual_seed(0)
    model = Codes()
    optimizer, kept = torch.optim.Adam(model.parameters(), 1e-3), halved(model.inner.weight) if wrong else None

    def loss_of(model, x):
        y, commitment = model(x)
        return F.mse_loss(y.float(), x) + commitment

    if not watched:
        return train(model, optimizer, dtype, loss_of), model
    with mpcompare.watch(model, optimizer) as seen:
        train(model, optimizer, dtype, loss_of)
    del kept
    return seen, model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_forward_replaces_are_seen(dtype):
    seen, model = codes(dtype, watched=True)
    _, plain = codes(dtype, watched=False)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert {"inner.weight"} == {defect.place for defect in codes(dtype, watched=True, wrong=True)[0].defects}


def test_buffers_that_forward_makes_or_replaces_are_as_they_were():
    made = Loop(make=Growing, batch=lambda: (torch.randn(32, 16), torch.randint(4, (32,))), dtype=torch.bfloat16)
    seen = made.run(mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], []), str(seen)
