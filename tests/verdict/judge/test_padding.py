"""NaN in a row of padding is accused where fp32 and the reference have a number."""

import math
from types import SimpleNamespace

import pytest

from mpcompare.verdict.judge.padding import Padding, checks

RIGHT = Padding(2.3, 2.3, {"a": True, "b": True})


def failed(run, reference, is_reference=False):
    case = SimpleNamespace(found=lambda check: {"padding": (run, reference)}[check], is_reference=is_reference)
    found = list(checks(case))
    assert {check.cause for check in found} <= {"normalization"}
    return {check.name: check.because for check in found if not check.passed}


def test_what_is_finite_passes():
    assert failed(RIGHT, RIGHT) == {}
    assert failed(Padding(2.4, 2.3, {"a": True}), RIGHT) == {}  # gradients that are not shown say nothing


def test_a_loss_that_is_no_number_is_accused():
    found = failed(Padding(math.nan, 2.3), RIGHT)
    assert list(found) == ["loss of padding"]
    assert "the loss is nan, and 2.3 in fp32" in found["loss of padding"]


def test_each_gradient_that_holds_nan_is_accused():
    assert list(failed(Padding(2.3, 2.3, {"a": True, "b": False}), RIGHT)) == ["gradient of padding, b"]


@pytest.mark.parametrize("reference", [Padding(math.nan, 2.3, {"a": True, "b": False}), None])
def test_what_the_reference_does_not_have_is_not_asked_for(reference):
    assert failed(Padding(math.inf, 2.3, {"b": False}), reference) == {}
    assert failed(None, RIGHT) == failed(RIGHT, None) == {}


def test_the_reference_itself_is_not_judged():
    wrong = Padding(math.nan, 2.3, {"a": False})
    assert failed(wrong, wrong, is_reference=True) == {}
