"""The errors that one rounding of each result makes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from support.backends import BACKENDS
from support.cases import CASES
from support.judging import examined
from support.marks import BF16_LSTM
from support.networks import DroppingGpt
from torch import nn

from mpcompare.dtypes import rounded_to
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.data.text import ALPHABET
from mpcompare.tasks.losses import cross_entropy
from mpcompare.tasks.task import params_of
from mpcompare.verdict.examine.forced.roundings import Roundings
from mpcompare.verdict.examine.rounded_operands import rounded
from mpcompare.verdict.examine.rounding import rounding_errors


@pytest.mark.slow
@BF16_LSTM
def test_what_one_rounding_does_is_what_amp_does():
    """Amp's gradients are as far from the oracle's as one rounding of each result makes them."""
    case = CASES["lstm"](1, "bf16")
    run = examined("amp", BACKENDS["amp"], case.task, case.dataset, "bf16", case.seed, steps=1)
    assert run.findings.rounding == {}  # the forced replay sees each layer
    model, batch = case.task.new_model(case.seed, torch.device("cpu")), case.task.batch_size
    step = [(case.dataset.x_train[:batch], case.dataset.y_train[:batch])]
    rounding = rounding_errors(model, case.task.loss_fn, step, PRECISIONS["bf16"])
    # In fewer than 4 dimensions a draw may be below 0.15 by luck. In 4 it is so once in 1000: chi2.ppf(1e-3, 4) is
    # 4 * 0.15^2.
    seen = {name: e for name, e in run.findings.first.gradients.items() if rounding[name].dimensions > 4}
    assert len(seen) >= 6  # all but the bias of the last layer
    ratios = [e.error / rounding[name].error for name, e in seen.items()]
    assert min(ratios) > 0.15
    assert max(ratios) < 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rounded_network_shares_nothing_but_what_is_tied(precision, dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].weight, model[1].weight.requires_grad = model[0].weight, False
    kept = copy.deepcopy(model.state_dict())
    copied = rounded(model, PRECISIONS[precision], dtype)
    assert copied[2].weight is copied[0].weight
    assert torch.equal(copied[0].weight.float(), rounded_to(kept["0.weight"], PRECISIONS[precision].weight))
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
    for p in copied.parameters():
        assert p.data.mul_(0).dtype is dtype
    assert all(torch.equal(p, kept[name]) for name, p in model.state_dict().items())


def test_what_cancels_is_not_0_but_for_rounding():
    """A bias before a batch norm has the gradient 0, and roundings make another number of it."""
    case = CASES["cnn"](1, "bf16")
    model = case.task.new_model(1, torch.device("cpu"))
    x, y = case.dataset.x_train[:16], case.dataset.y_train[:16]
    found = rounding_errors(model, case.task.loss_fn, [(x, y)], PRECISIONS["bf16"])
    assert set(found) >= set(params_of(model)) | {"norm1.running_mean", "norm1.running_var"}
    assert found["conv1.bias"].error > 1e-5
    assert all(e.dimensions >= 1 for e in found.values())
    in_fp16 = rounding_errors(model, case.task.loss_fn, [(x, y)], PRECISIONS["fp16"])
    error, smaller = (of["output.weight"].error for of in (found, in_fp16))  # many dimensions: it hardly varies
    assert error / smaller == pytest.approx(8, rel=0.25)  # 2^-8 and 2^-11


def _has_a_derivative(function):
    x = torch.ones(2, requires_grad=True)
    try:
        return torch.autograd.grad(function(x), x) is not None
    except RuntimeError:  # torch 2.11 differentiates no aminmax
        return False


@pytest.mark.parametrize(
    "largest",
    [
        lambda x: torch.zeros(3, 4).scatter_reduce(0, torch.arange(6).remainder(3)[:, None].expand(6, 4), x, "amax"),
        lambda x: torch.linalg.vector_norm(x, math.inf, dim=0),
        pytest.param(
            lambda x: torch.aminmax(x, dim=0).max,
            marks=pytest.mark.skipif(
                not _has_a_derivative(lambda x: torch.aminmax(x, dim=0).max), reason="this torch has no such derivative"
            ),
        ),
    ],
)
def test_the_largest_number_is_found_again_in_backward(largest):
    """Its gradient is NaN where no number of the input is the result."""
    roundings, x = Roundings(PRECISIONS["bf16"]), torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) + 1
    x.requires_grad_()
    with roundings:
        roundings.passing("forward")
        largest(x * 1.7).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_rounded_as_it_was(reentrant):
    """A checkpoint computes the same numbers, so its errors are as in the network without a checkpoint."""
    generator, found = torch.Generator().manual_seed(0), []
    x, y = (torch.randint(len(ALPHABET), (4, 8), generator=generator) for _ in "xy")
    for way in (None, reentrant):
        torch.manual_seed(1)
        model = DroppingGpt((len(ALPHABET), 8, 16, 2, 2), 0.3, functions=True, reentrant=way)
        found.append(rounding_errors(model, cross_entropy, [(x, y)], PRECISIONS["bf16"]))
    plain, again = found
    assert {name: e.error for name, e in again.items()} == pytest.approx({name: e.error for name, e in plain.items()})
    assert min(e.error for e in plain.values()) > 0


def test_the_bias_of_a_key_has_no_gradient_but_roundings_within_the_attention():
    """The shares of attention stay as they are if all scores of a query grow alike."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    model, x, y = Attention(), torch.randn(8, 12, 16), torch.randn(8, 12, 16)
    found = rounding_errors(model, F.mse_loss, [(x, y)], PRECISIONS["bf16"])
    weights = copy.deepcopy(model).bfloat16()
    F.mse_loss(weights(x.bfloat16()).float(), y).backward()
    error = weights.k.bias.grad.float().norm().item()
    assert 0.3 < error / found["k.bias"].error < 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_number_is_rounded_to_nearest_on_a_stretched_grid(precision, dtype):
    u = PRECISIONS[precision].unit_roundoff
    x = torch.randn(1000, dtype=dtype) * torch.logspace(-20, 20, 1000, dtype=dtype)
    x[:2] = torch.tensor([0.0, torch.inf])
    for sample in range(4):
        roundings = Roundings(PRECISIONS[precision], math.inf)
        roundings.passing("backward")  # the loss scale keeps gradients from fp16's smallest numbers
        roundings.sample = sample
        rounded = roundings.round_(x.clone())
        assert rounded[0] == 0
        assert rounded[1] == torch.inf
        errors = (rounded[2:].double() - x[2:].double()) / x[2:].double()
        own = 2.0**-24 if dtype is torch.float32 else 2.0**-53  # of the product and of the quotient
        assert errors.abs().max() <= u + 2 * own
        assert errors.abs().max() > 0.5 * u
        assert errors.mean().abs() < 5 * u / 1000**0.5


def test_a_convolution_that_is_summed_in_fp16_has_gradients_with_their_loss_scale():
    """Without the loss scale, which every step has, the gradient of a mean is below fp16's smallest number."""
    convolution, x = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 8, 8, generator=torch.manual_seed(0))
    gradient = 1e-9 * torch.randn(2, 4, 6, 6, generator=torch.manual_seed(1))
    (exact,) = torch.autograd.grad(convolution(x), convolution.weight, gradient)
    roundings = Roundings(PRECISIONS["fp16"], 2.0**20)
    roundings.convolves_in = torch.float16
    roundings.passing("backward")
    y = convolution(x)
    with roundings:
        (seen,) = torch.autograd.grad(y, convolution.weight, gradient)
    assert 0 < (seen - exact).norm() < 8 * 2.0**-11 * exact.norm()


def test_a_pool_that_a_cpu_has_in_fp32_alone_is_added_up_in_full():
    """``nn.LocalResponseNorm`` has such a pool."""
    x = torch.randn(1, 1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    mode = Roundings(PRECISIONS["bf16"])
    mode.passing("backward")
    y = F.avg_pool3d(x, 2, 1).sum()
    (right,) = torch.autograd.grad(y, x, retain_graph=True)
    with mode:
        (rounded,) = torch.autograd.grad(y, x)
    apart = ((rounded - right).abs() / right).max().item()
    assert 0 < apart <= 2**-7
