"""Networks with several inputs and outputs are judged as all others are."""

import dataclasses

import pytest
from support.backends import BACKENDS
from support.judging import examined
from support.marks import slow_after
from support.trees import HUGGING_FACE, TREES, HalvesGradients

from mpcompare.report.verdicts import judge_run

CASES = slow_after(1, [*TREES, *HUGGING_FACE])


@pytest.mark.parametrize("precision", slow_after(1, ["bf16", "fp16", "fp32"]))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_right_backends_are_the_same_on_a_network_of_trees_and_halved_gradients_are_not(name, precision, accumulate):
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    task, data = {**TREES, **HUGGING_FACE}[name]()
    task = dataclasses.replace(task, accumulate=accumulate)
    reference = "fp32" if precision == "fp32" else "amp"
    beside = examined(reference, BACKENDS[reference], task, data, precision, steps=4, noise=2)
    verdict = judge_run(beside, beside)
    assert verdict.word in ("same", "reference"), f"{verdict}: {verdict.because}"
    if precision == "fp32":
        return
    right = judge_run(examined("mw", BACKENDS["master_weights"], task, data, precision, steps=4), beside)
    assert right.word == "same", f"{right}: {right.because}"
    wrong = judge_run(examined("halved", HalvesGradients, task, data, precision, steps=4), beside)
    # In a step of two micro-batches one of them alone makes half of the gradients, too.
    assert str(wrong) == f"differs: {'gradient scaled' if accumulate == 1 else 'accumulation'}"
