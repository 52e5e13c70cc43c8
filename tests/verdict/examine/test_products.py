"""Backends that call no module show operands of products. Their steps have a forced replay, too."""

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.products import LAYERS, TASK, shows_its_products

from mpcompare.backends.scratch import Scratch
from mpcompare.report.verdicts import judge_run

NAMES = [pytest.param("scratch", marks=pytest.mark.slow), "fused"]


@pytest.mark.parametrize("name", NAMES)
def test_watching_changes_no_bit_and_shows_what_makes_the_gradients(name):
    shows_its_products(BACKENDS[name], rectified=name == "fused")


@pytest.fixture(scope="module")
def amp():
    return examined("amp", BACKENDS["amp"], TASK, dataset_of(TASK), "bf16", steps=4, noise=2)


@pytest.mark.parametrize("name", NAMES)
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
    ("backend", "named"),
    [
        (BiasLeftOut, "the output of layer2"),
        pytest.param(MaskLeftOut, "the gradient that arrives at layer1", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_operand_is_named(backend, named, amp):
    run = examined("wrong", backend, TASK, dataset_of(TASK), "bf16", steps=4)
    verdict = judge_run(run, amp)
    assert verdict.word == "differs"
    failed = [check for check in verdict.checks if not check.passed and check.kind == "layers"]
    assert named in failed[0].because
