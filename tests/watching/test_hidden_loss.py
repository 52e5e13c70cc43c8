"""``mpcompare.watch`` on losses in a function of autograd. If such a function has an argument that a tape cannot hold,
the layers are examined, and the watch says that the loss is not."""

import pytest
import torch
from support.watched_loops import Loop, small_network, spoil
from torch import nn

import mpcompare
from mpcompare.watching.sight import HowFar


class Fused(torch.autograd.Function):
    """Cross-entropy whose gradient is made in forward, with settings that nobody knows."""

    @staticmethod
    def forward(ctx, z, y, settings):
        log_p = z.float().log_softmax(-1)
        rows = torch.arange(len(y))
        g = log_p.exp()
        g[rows, y] -= 1
        ctx.save_for_backward((g / len(y)).to(z.dtype))
        return -log_p[rows, y].mean()

    @staticmethod
    def backward(ctx, g):
        (of_z,) = ctx.saved_tensors
        return of_z * g.to(of_z.dtype), None, None


class FusedWithHead(torch.autograd.Function):
    """Cross-entropy of a product that the function computes itself."""

    @staticmethod
    def forward(ctx, h, w, y):
        log_p = (h.float() @ w.t()).log_softmax(-1)
        rows = torch.arange(len(y))
        g = log_p.exp()
        g[rows, y] -= 1
        g = g / len(y)
        ctx.save_for_backward((g @ w).to(h.dtype), g.t() @ h.float())
        return -log_p[rows, y].mean()

    @staticmethod
    def backward(ctx, g):
        of_h, of_w = ctx.saved_tensors
        return of_h * g.to(of_h.dtype), of_w * g, None


class Head(nn.Module):
    """A network whose embedding is the head of the loss, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.norm = nn.Embedding(32, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.hidden(self.embedding(x)).tanh()).mean(1)


def loop(tied: bool, wrong: bool, **options) -> Loop:
    made = Loop(updates=2, loss=lambda z, y: Fused.apply(z, y, object()), **options)

    def make():
        model = Head() if tied else small_network()
        if wrong:
            layer = model.hidden if tied else model[2]
            spoil(layer.weight, torch.neg)
        return model

    made.make = make
    if tied:
        made.loss = lambda h, y: FusedWithHead.apply(h, made.made["model"].embedding.weight, y)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_layers_are_examined_where_the_loss_is_hidden(tied, dtype, accumulate):
    seen = loop(tied, False, dtype=dtype, accumulate=accumulate).run(mpcompare.watch)
    assert seen.defects == [], str(seen)
    if tied:  # the loss is given tensors alone, and is replayed
        assert (seen.not_examined, seen.facts["own_backward"]) == ([], {"FusedWithHead": 0.0})
    else:
        (said,) = seen.not_examined
        assert said.startswith("the loss of update 1, 2 (it depends on Fused")
    seen = loop(tied, True, dtype=dtype, accumulate=accumulate).run(mpcompare.watch)
    assert {defect.place for defect in seen.defects} == {"hidden.weight" if tied else "2.weight"}


def test_a_card_without_seen_gradients_names_no_error_of_one():
    seen = HowFar({"0": True}, {"gate": False}, [], 0.0, [])
    assert str(seen) == "1 of 1 layers and 0 of 1 parameters are seen"


def test_a_backward_within_backward_is_said():
    """Embeddings are computed without gradients, and once more in a hook (GradCache)."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        with torch.no_grad():
            kept = model(x)
        kept.requires_grad_()
        loss = kept.square().mean()

        def again(grad):
            with torch.enable_grad():
                (model(x) * kept.grad).sum().backward()

        kept.grad = torch.autograd.grad(loss, kept, retain_graph=True)[0]
        loss.register_hook(again)
        loss.backward()
        optimizer.step()
    assert seen.not_examined == ["gradients that no backward made, or one that a hook calls within another one"]
    assert [seen.defects, seen.facts["updates"]] == [[], 1]
