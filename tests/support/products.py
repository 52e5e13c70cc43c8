"""The operands that a backend shows of its products, compared with the gradients that it makes of them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from support.tasks import make_batch, make_task
from torch import Tensor

from mpcompare.contract import Walk
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.operands import Operands

TASK = replace(make_task(in_features=30, hidden=[24, 16], batch_size=64, samples=640), accumulate=2, clip_norm=1.0)
LAYERS = ["layer1", "layer2", "layer3"]


def shows_its_products(backend_class: Any, rectified: bool) -> None:
    """Asserts that a watched step in fp16 computes the same bits, and that the shown operands make its gradients.

    Args:
        rectified: whether the outputs of hidden layers are shown behind relu.
    """
    grads, _, _ = _taken(backend_class, watched=False)
    same, shown, scale = _taken(backend_class, watched=True)
    assert all(torch.equal(grads[each], same[each]) for each in grads)
    assert list(shown) == LAYERS
    for layer, calls in shown.items():
        assert len(calls) == TASK.accumulate
        dW = torch.stack([each.gradient.double().t() @ each.input.double() for each in calls]).sum(dim=0) / scale
        assert (grads[f"{layer}.weight"] - dW).norm() <= 2.0**-11 * dW.norm()
    for below, above in pairwise(LAYERS):
        for a, z in zip(shown[below], shown[above], strict=True):
            assert torch.equal(a.output.relu(), z.input)
            assert a.rectified == rectified


def _taken(backend_class: Any, watched: bool) -> tuple[dict[str, Tensor], dict[str, list[Operands]], float]:
    """Returns the gradients of a step, the operands that were shown where it was watched, and the loss scale."""
    model = TASK.new_model(0, torch.device("cpu"))
    backend = backend_class(model, TASK, "fp16", DynamicLossScale(init_scale=2.0**10))
    batch = TASK.micro_batches(*make_batch(TASK, torch.device("cpu")))
    walk, scale = Walk(backend, batch, 0.1), float(backend.loss_scale())
    if not watched:
        walk.through("unscale")
        return backend.grads(), {}, scale
    with backend.watched_products() as products:
        walk.through("unscale")
    grads, shown = backend.grads(), products.shown()
    walk.finish()
    Walk(backend, batch, 0.1).finish()
    assert len(products.shown()[LAYERS[0]]) == TASK.accumulate  # nobody watches any more
    return grads, shown, scale
