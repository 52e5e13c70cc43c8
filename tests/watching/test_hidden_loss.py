"""``mpcompare.watch`` on losses in a function of autograd. If such a function has an argument that a tape cannot hold,
the layers are examined, and the watch says that the loss is not."""

from contextlib import nullcontext

import pytest
import torch
from support.marks import diagonal
from support.watched_loops import Loop, small_network, spoil
from torch import nn
from torch.nn import functional as F

import mpcompare
from mpcompare.watching.judged import HowFar


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


@pytest.mark.slow
@diagonal(1, is_leaf=[True, False], dtype=[torch.float32, torch.bfloat16])
def test_a_backward_within_backward_is_seen(is_leaf, dtype):
    """Embeddings are computed without gradients, and once more in a hook, as in the cached losses of
    sentence-transformers."""

    def train(watch, factor=1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        weight = model[0].weight
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: (grads[0] * factor,))
        with watch(model, optimizer) as seen:
            for _ in range(2):
                optimizer.zero_grad()
                step(model)
                optimizer.step()
        return model, seen

    def step(model):
        parts = torch.randn(32, 8).split(16)
        states = []
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            kept = []
            for part in parts:
                states.append(torch.get_rng_state())
                kept.append(model(part).float().requires_grad_())
        loss = F.mse_loss(torch.cat(kept), torch.ones(32, 4))
        loss.backward(retain_graph=True)
        loss = loss.detach().requires_grad_() if is_leaf else loss

        def again(gradient):
            for part, state, own in zip(parts, states, kept, strict=True):
                with torch.enable_grad(), torch.random.fork_rng():
                    torch.set_rng_state(state)
                    (torch.dot(model(part).flatten(), own.grad.flatten()) * gradient).backward()

        loss.register_hook(again)
        loss.backward()

    watched, seen = train(mpcompare.watch)
    plain, _ = train(lambda *given: nullcontext())
    assert (seen.defects, seen.not_examined) == ([], [])
    assert list(seen.sight.parameters.values()) == [True] * 4
    assert all(map(torch.equal, watched.parameters(), plain.parameters()))
    _, wrong = train(mpcompare.watch, 0.5)
    assert {defect.place for defect in wrong.defects} == {"0.weight"}
