"""Complex weights as pairs of real ones."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mpcompare.tasks.complex_weights import as_real
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task


class Filters(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4, dtype=torch.complex64), nn.Linear(4, 4, dtype=torch.complex64)
        self.scales = nn.ParameterList([torch.randn(4, dtype=torch.complex64)])
        if tied:
            self.last.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x.to(torch.complex64)).tanh()) * self.scales[0]
        return found.abs()


def train(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator, losses = torch.manual_seed(1), []
    for _ in range(4):
        loss = network(torch.randn(8, 5, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_network_trains_as_with_its_complex_weights(make, tied):
    torch.manual_seed(0)
    network = Filters(tied)
    real = copy.deepcopy(network)
    as_real(real)
    assert all(p.dtype is torch.float32 for p in real.parameters())
    assert sum(p.numel() for p in real.parameters()) == 2 * sum(p.numel() for p in network.parameters())
    assert train(real, make(real.parameters())) == pytest.approx(train(network, make(network.parameters())), rel=1e-6)
    pairs = [(network.first.weight, real.first.weight), (network.scales[0], real.scales[0])]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def test_frozen_weights_stay_frozen():
    network = Filters()
    network.first.weight.requires_grad_(False)
    as_real(network)
    frozen = [name for name, p in network.named_parameters() if not p.requires_grad]
    assert frozen == [f"first.parametrizations.weight.original{part}" for part in (0, 1)]


def test_a_task_has_real_weights_only():
    model = Task(Filters, "mse", Sgd(0.1), 8).new_model(0, torch.device("cpu"))
    assert not any(p.is_complex() for p in model.parameters())
    assert model.first.weight.is_complex()
