"""Networks that solve a differential equation, and whose backward calls a part of the network (the adjoint method of
Chen et al., NeurIPS 2018)."""

import torch
from torch import nn
from torch.nn import functional as F

import mpcompare

STEPS = 3


class Adjoint(torch.autograd.Function):
    """Euler's method. Backward has the values of forward, or computes them anew from the end."""

    @staticmethod
    def forward(ctx, slope, keeps, start, *params):
        ctx.slope, ctx.keeps = slope, keeps
        values = [start]
        for _ in range(STEPS):
            values.append(values[-1] + slope(values[-1]) / STEPS)
        ctx.save_for_backward(*values)
        ctx.params = params
        return values[-1]

    @staticmethod
    def backward(ctx, gradient):
        values = list(ctx.saved_tensors)
        end, sums = values.pop(), [torch.zeros_like(p) for p in ctx.params]
        while values:
            y = (values[-1] if ctx.keeps else end).detach().requires_grad_()
            with torch.enable_grad():
                slope = ctx.slope(y)
            down, *found = torch.autograd.grad(slope, [y, *ctx.params], gradient / STEPS, allow_unused=True)
            sums = [a if b is None else a + b for a, b in zip(sums, found, strict=True)]
            gradient, end = gradient + down, end - slope.detach() / STEPS
            values.pop()
        return None, None, gradient, *sums


class Solver(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.first, self.last, self.keeps = nn.Linear(8, 8), nn.Linear(8, 3), keeps
        self.slope = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x):
        params = tuple(self.slope.parameters())
        return self.last(Adjoint.apply(self.slope, self.keeps, self.first(x), *params))


def watched(keeps, times=1.0):
    torch.manual_seed(0)
    model = Solver(keeps)
    weight = model.slope[0].weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: (times * grads[0],))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        F.cross_entropy(model(torch.randn(32, 8)), torch.randint(3, (32,))).backward()
        optimizer.step()
    return seen


def test_an_adjoint_that_calls_layers_with_the_numbers_of_forward_is_seen():
    seen = watched(keeps=True)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert all(seen.sight.parameters.values())
    assert [defect.place for defect in watched(keeps=True, times=0.5).defects] == ["slope.0.weight"]


def test_an_adjoint_that_calls_layers_with_other_numbers_is_not_accused():
    seen = watched(keeps=False)
    (said,) = seen.not_examined
    assert "backward calls slope.0 with other numbers than forward did" in said
    assert not seen.defects
