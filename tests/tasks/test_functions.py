import pytest
import torch
import torch.nn.functional as F
from support.backends import BACKENDS
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompare.loss_scale import NoLossScale
from mpcompare.tasks.cast import cast_module
from mpcompare.tasks.functions import ProductsIn
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task


class Spectrum(nn.Module):
    """Takes frequencies, for which there are no kernels in 16 bits, and has no buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(10, 3)

    def forward(self, x):
        return self.last(torch.view_as_real(torch.fft.rfft(self.first(x))).flatten(1))


class Codebook(nn.Module):
    """Returns the distances to the rows of a table."""

    def __init__(self):
        super().__init__()
        self.first, self.table = nn.Linear(8, 8), nn.Embedding(5, 8)

    def forward(self, x):
        return torch.cdist(self.first(x), self.table.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_functions_that_autocast_computes_in_fp32_are_computed_so_in_a_cast_module(dtype):
    spectrum, codebook, x = Spectrum(), Codebook(), torch.rand(4, 8, dtype=dtype)
    for model in (spectrum, codebook):
        cast_module(model, dtype)
    for _ in range(2):
        assert spectrum(x).dtype is dtype
        assert codebook(x).dtype is torch.float32
    codebook(x).sum().backward()
    assert codebook.first.weight.grad.dtype is dtype


@pytest.mark.parametrize(
    "product",
    [
        lambda x, a, b: torch.linalg.matmul(x, a),
        lambda x, a, b: torch.linalg.vecdot(x, a),
        lambda x, a, b: torch.linalg.multi_dot([x, a, b]),
        lambda x, a, b: torch.einsum("ij,jk,kl", [x, a, b]),
        lambda x, a, b: torch.addmv(x[0], a, b[0]),
        lambda x, a, b: x[0].addmv(a, vec=b[0]),
        lambda x, a, b: F.prelu(x, a[0]),
    ],
)
def test_a_product_of_16_bit_and_fp32_numbers_is_one_of_16_bits(product):
    x, a, b = torch.rand(4, 4).bfloat16(), torch.rand(4, 4), torch.rand(4, 4)
    with ProductsIn(torch.bfloat16, always=True):
        found = product(x, a, b)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, product(x, a.bfloat16(), b.bfloat16()))


def test_a_module_that_needs_no_casts_is_called_without_the_mode(monkeypatch):
    entered, own = [], ProductsIn.__enter__
    monkeypatch.setattr(ProductsIn, "__enter__", lambda self: entered.append(self) or own(self))
    plain, spectrum, x = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)), Spectrum(), torch.rand(4, 8).bfloat16()
    for model, times in ((plain, 1), (spectrum, 3)):
        entered.clear()
        cast_module(model, torch.bfloat16)
        for _ in range(3):
            model(x)
        assert len(entered) == times


def test_a_first_call_that_fails_does_not_tell_that_no_casts_are_needed():
    model = Spectrum()
    cast_module(model, torch.bfloat16)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.rand(4, 7).bfloat16())
    assert model(torch.rand(4, 8).bfloat16()).shape == (4, 3)


class Again(nn.Module):
    """Computes a product with what was multiplied with a buffer once more in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 3), reentrant
        self.register_buffer("scale", torch.full((8,), 0.7))

    def forward(self, x):
        return checkpoint(lambda h: self.last(torch.relu(h * self.scale)), self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_calls_layers_in_backward_finds_the_same_formats(reentrant):
    task = Task(lambda: Again(reentrant), "cross_entropy", Sgd(0.1, 0.0), 4)
    backend = BACKENDS["master_weights"](task.new_model(0, torch.device("cpu")), task, "bf16", NoLossScale())
    backend.forward(torch.rand(4, 8), torch.tensor([0, 1, 2, 0]))
    backend.backward()
    assert all(g.any() for g in backend.grads().values())
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


class Biases(nn.Module):
    """Looks a bias up for each row, in one of two ways."""

    def __init__(self, lookup):
        super().__init__()
        self.first, self.table, self.lookup = nn.Linear(8, 8), nn.Parameter(torch.zeros(2, 8)), lookup

    def forward(self, x, at):
        return self.first(x) + self.lookup(self.table, at)


@pytest.mark.parametrize("lookup", [lambda table, at: table[at], lambda table, at: F.embedding(at, table)])
def test_gradients_of_rows_that_are_looked_up_are_summed_in_fp32(lookup):
    model, at = Biases(lookup), torch.zeros(4096, dtype=torch.int64)
    cast_module(model, torch.bfloat16)
    output = model(torch.rand(4096, 8).bfloat16(), at)
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert model.table.grad.dtype is torch.bfloat16
    assert torch.equal(model.table.grad[0], torch.full((8,), 4096.0).bfloat16())  # bf16 alone stops at 256
