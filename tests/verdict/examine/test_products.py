"""The operands that scratch and fused show of their products, and the forced replay of such a step."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_batch, make_task

from mpcompare.backends.scratch import Scratch
from mpcompare.contract import Walk
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.report.verdicts import judge_run

TASK = replace(make_task(in_features=30, hidden=[24, 16], batch_size=64, samples=640), accumulate=2, clip_norm=1.0)
LAYERS = ["layer1", "layer2", "layer3"]


def taken(name, watched):
    """Returns the gradients of a step, and the operands that were shown where it was watched."""
    model = TASK.new_model(0, torch.device("cpu"))
    backend = BACKENDS[name](model, TASK, "fp16", DynamicLossScale(init_scale=2.0**10))
    batch = TASK.micro_batches(*make_batch(TASK, torch.device("cpu")))
    walk = Walk(backend, batch, 0.1)
    if not watched:
        walk.through("unscale")
        return backend.grads(), {}, backend
    with backend.watched_products() as products:
        walk.through("unscale")
    return backend.grads(), products.shown(), backend


@pytest.mark.parametrize("name", ["scratch", "fused"])
def test_watching_changes_no_bit_and_shows_what_makes_the_gradients(name):
    grads, _, _ = taken(name, watched=False)
    same, shown, backend = taken(name, watched=True)
    assert all(torch.equal(grads[each], same[each]) for each in grads)
    assert list(shown) == LAYERS
    for layer, calls in shown.items():
        assert len(calls) == TASK.accumulate
        dW = sum(each.gradient.double().t() @ each.input.double() for each in calls) / float(backend.loss_scale())
        assert (grads[f"{layer}.weight"] - dW).norm() <= 2.0**-11 * dW.norm()
    for below, above in pairwise(LAYERS):
        for a, z in zip(shown[below], shown[above], strict=True):
            assert torch.equal(a.output.relu(), z.input)
            assert a.rectified == (name == "fused")
    assert "_forward" not in vars(backend)
    assert "backward" not in vars(backend)


@pytest.fixture(scope="module")
def amp():
    return examined("amp", BACKENDS["amp"], TASK, dataset_of(TASK), "bf16", steps=4, noise=2)


@pytest.mark.parametrize("name", ["scratch", "fused"])
def test_every_operand_is_compared_and_right_within_one_rounding(name, amp):
    run = examined(name, BACKENDS[name], TASK, dataset_of(TASK), "bf16", steps=4)
    assert judge_run(run, amp).word == "same"
    for found in run.findings.replays.values():
        expected = {f"{kind} {layer}" for kind in ("input", "output", "gradient") for layer in LAYERS}
        assert expected <= found.places.keys()
        u = 2.0**-8
        assert all(place.error <= u * place.norm for at, place in found.places.items() if at.startswith("output layer"))
        assert all(found.places[f"input {layer}"].error == 0 for layer in LAYERS)  # relu selects


class BiasLeftOut(Scratch):
    def forward(self, x, y):
        gemm, number = self.gemm, iter(range(1, 4))

        def without(a, b, out, **how):
            gemm(a, b, out.zero_() if next(number) == 2 else out, **how)

        self.gemm = without
        try:
            return super().forward(x, y)
        finally:
            self.gemm = gemm


class MaskLeftOut(Scratch):
    def backward(self):
        self.z[1] = self.z[1].where(self.z[1] > 0, 1e-30)  # every unit of the layer counts as on
        super().backward()


@pytest.mark.parametrize(
    ("backend", "named"), [(BiasLeftOut, "the output of layer2"), (MaskLeftOut, "the gradient that arrives at layer1")]
)
def test_a_wrong_operand_is_named(backend, named, amp):
    run = examined("wrong", backend, TASK, dataset_of(TASK), "bf16", steps=4)
    verdict = judge_run(run, amp)
    assert verdict.word == "differs"
    failed = [check for check in verdict.checks if not check.passed and check.kind == "layers"]
    assert named in failed[0].because
