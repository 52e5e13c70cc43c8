"""A network that is given a sparse tensor, such as the edges of a graph, or a nested one."""

import pytest
import torch
from support.marks import diagonal
from torch import Tensor, nn
from torch.nn import functional as F

import mpcompare


class Graph(nn.Module):
    """Two layers of a graph network (Kipf and Welling, ICLR 2017), whose edges are in a layer's argument."""

    class Layer(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            result: Tensor = torch.sparse.mm(edges, (x @ self.weight).float())
            return result

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = self.Layer(8, 16), self.Layer(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x, edges).relu(), edges)
        return result


@diagonal(layout=[torch.sparse_coo, torch.sparse_csr], dtype=[torch.float32, torch.bfloat16])
def test_a_sparse_input_is_an_operand(layout, dtype):
    torch.manual_seed(0)
    model = Graph()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    edges = (torch.rand(12, 12) > 0.6).float().to_sparse(layout=layout)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                loss = F.cross_entropy(model(torch.rand(12, 8), edges), torch.arange(12) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (seen.defects, seen.not_examined) == ([], [])
    assert seen.sight is not None
    assert all(seen.sight.parameters.values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_input_is_not_examined(layout):
    """The watch stopped with an error of its own. It goes on, and sees both updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(2):
            rows = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=layout)
            model(rows).to_padded_tensor(0.0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen.defects == []
    said = "the gradients of update 1, 2, layer by layer (the network is given a nested tensor)"
    assert (seen.facts["updates"], seen.not_examined) == (2, [said])
