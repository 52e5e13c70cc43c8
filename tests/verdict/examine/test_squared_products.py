"""The squares of the terms of layers of products, compared with the products of squared operands."""

import pytest
import torch
from torch import nn

from mpcompare.verdict.examine.forced.terms import SquaredProduct, squares

LAYERS = {
    "linear": (nn.Linear(5, 7), (3, 5)),
    "linear of a sequence": (nn.Linear(5, 7), (3, 4, 5)),
    "linear of a vector": (nn.Linear(5, 7), (5,)),
    "convolution": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (3, 4, 9, 8)),
    "in groups": (nn.Conv2d(4, 6, 3, groups=2, dilation=2), (3, 4, 9, 8)),
    "by channel": (nn.Conv1d(4, 4, 3, groups=4, padding="same"), (3, 4, 9)),
    "circular": (nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (3, 4, 9)),
    "without a batch": (nn.Conv3d(2, 4, 2, bias=False), (2, 5, 4, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_sums_of_squares_are_the_ones_of_all_terms(name):
    layer, shape = LAYERS[name]
    layer = layer.double().requires_grad_(False)
    generator = torch.manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    # The same layer of squared operands sums the squares of the terms.
    x2, w2 = squares(x).requires_grad_(), squares(layer.weight).requires_grad_()
    nothing = {} if layer.bias is None else {"bias": torch.zeros_like(layer.bias)}
    y2 = torch.func.functional_call(layer, {"weight": w2, **nothing}, x2)
    g2 = squares(torch.randn(y2.shape, generator=generator, dtype=torch.float64))
    of_x, of_w = torch.autograd.grad(y2, [x2, w2], g2)
    found = SquaredProduct(layer, x, layer.weight)
    assert found.of_output() == pytest.approx(y2.sum().item(), rel=1e-5)
    assert found.of_weight(g2) == pytest.approx(of_w.sum().item(), rel=1e-5)
    down = found.of_input(g2)
    assert down.shape == x.shape
    assert down.sum().item() == pytest.approx(of_x.sum().item(), rel=1e-5)
    # Each element is known by its channel, and by its row and place.
    assert (down - of_x).norm() < 0.4 * of_x.norm()


def test_numbers_that_are_not_finite_are_no_terms():
    assert squares(torch.tensor([2.0, -torch.inf, torch.nan])).tolist() == [4.0, 0.0, 0.0]
