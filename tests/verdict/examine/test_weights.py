"""The parameters of a replay: cast where a layer computes, freed until its backward."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mpcompare.tasks.task import sharing_parameters
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic
from mpcompare.verdict.examine.forced.own_products import as_operands
from mpcompare.verdict.examine.forced.weights import Weights, fill, free, in_dtype


class Tied(nn.Module):
    """Uses the weights of its embedding once more, between layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)

    def forward(self, x):
        z = self.embedding(x)
        return functional.linear(z.to(self.embedding.weight.dtype), self.embedding.weight)


def test_a_parameter_between_layers_is_taken_in_the_dtype_of_the_replay():
    torch.manual_seed(0)
    network = Tied()
    weights = Weights(network, Arithmetic(torch.float64))
    with weights:
        output = network(torch.tensor([1, 2]))
        assert network.embedding.weight.dtype is torch.float64
        assert network.embedding.weight.shape == (5, 3)
    assert output.dtype is torch.float64
    output.square().sum().backward()
    exact = Tied().double()
    exact.load_state_dict(network.state_dict())
    exact(torch.tensor([1, 2])).square().sum().backward()
    assert network.embedding.weight.dtype is torch.float32
    assert network.embedding.weight.grad is None
    assert torch.allclose(weights.between["embedding.weight"].grad, exact.embedding.weight.grad, rtol=1e-14)


def test_a_parameter_has_the_digits_that_the_step_held():
    network = nn.Linear(7, 7)
    weights = Weights(network, Arithmetic(torch.float64))
    cast = weights.cast(network.weight, torch.bfloat16)
    assert torch.equal(cast, network.weight.detach().bfloat16().double())
    weights.held = {"weight": torch.float16}
    assert torch.equal(weights.cast(network.weight), network.weight.detach().half().double())
    same = Weights(network, Arithmetic(torch.float32)).cast(network.weight)
    assert same.data_ptr() != network.weight.data_ptr()


def test_backward_finds_the_numbers_of_an_operand_that_was_freed_and_filled():
    torch.manual_seed(0)
    p, x = torch.randn(50, 40), torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    operand = p.double().requires_grad_()
    output = functional.linear(x, operand).tanh()
    free(operand)
    assert operand.untyped_storage().nbytes() == 0
    fill(operand, p, lambda t: t)
    found = torch.autograd.grad(output.sum(), [x, operand])
    again = p.double().requires_grad_()
    assert all(
        torch.equal(a, b)
        for a, b in zip(found, torch.autograd.grad(functional.linear(x, again).tanh().sum(), [x, again]), strict=True)
    )


def test_filling_rounds_an_operand_as_it_was_taken():
    operand = torch.ones(4000, dtype=torch.float64)
    free(operand)
    fill(operand, torch.full((4000,), 3.0), lambda t: t * 2)
    assert torch.equal(operand, torch.full((4000,), 6.0, dtype=torch.float64))


def test_a_network_in_another_dtype_shares_its_parameters_and_no_buffers():
    network = nn.BatchNorm1d(4)
    copied = in_dtype(network, torch.float64)
    assert copied.weight is network.weight
    assert copied.running_mean.dtype is torch.float64
    copied.running_mean.add_(1)
    assert network.running_mean.dtype is torch.float32
    assert not network.running_mean.any()
    with_buffers = sharing_parameters(network, {"running_mean": torch.ones(4)})
    assert with_buffers.running_mean.tolist() == [1, 1, 1, 1]
    assert not network.running_mean.any()


def test_a_part_of_a_larger_storage_keeps_its_numbers():
    row, numbers = torch.randn(30, dtype=torch.float64), torch.randn(3, 4)
    operand = row[5:17].view(3, 4)
    before = row.clone()
    free(operand)
    fill(operand, numbers, lambda t: t)
    assert torch.equal(row, before)
    assert row.untyped_storage().nbytes() == 30 * 8


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_operands_of_a_product_are_rounded_while_the_weights_are_entered(half):
    """The mode widens the network's own casts. The rounding of an operand is no cast of the network."""
    network = nn.Linear(3, 2)
    x = torch.randn(5, 3, dtype=torch.float64)
    with Weights(network, Arithmetic(torch.float64)):
        rounded, weight = as_operands((x, network.weight.double()), half)
    assert torch.equal(rounded, x.to(half).double())
    assert torch.equal(weight, network.weight.to(half).double())
