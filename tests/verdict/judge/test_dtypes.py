"""Layers that compute their products in another format than the precision's, though their output does not show it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from planted import layers
from support.judging import compared_with_amp, dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.promises import Promises
from mpcompare.report.verdicts import judge_run
from mpcompare.verdict.findings import Findings, Recipe
from mpcompare.verdict.judge.check import Case, Examined
from mpcompare.verdict.judge.drive import Drive, Gradients
from mpcompare.verdict.judge.dtypes import checks as dtype_checks

TASK = make_task(samples=32 * 12)
DATA = dataset_of(TASK)


class ForwardAndBackwardIn(torch.autograd.Function):
    """A product of bf16 numbers that is computed in other formats."""

    @staticmethod
    def forward(ctx, x, weight, bias, forward, backward):
        x, weight, bias = (t.bfloat16() for t in (x, weight, bias))
        ctx.save_for_backward(x, weight)
        ctx.format = backward
        return F.linear(*(t.to(forward) for t in (x, weight, bias))).bfloat16()

    @staticmethod
    def backward(ctx, grad):
        x, weight, grad = (t.to(ctx.format) for t in (*ctx.saved_tensors, grad))
        found = (grad @ weight, grad.t() @ x, grad.sum(0))
        return (*(g.float() for g in found), None, None)


class Patched(layers.Patched):
    formats = (torch.bfloat16, torch.bfloat16)

    def patch(self, model):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, m=module: self.product(m, x)

    def product(self, module, x):
        with torch.autocast("cpu", enabled=False):
            return ForwardAndBackwardIn.apply(x, module.weight, module.bias, *self.formats)


class ForwardInFp32(Patched):
    formats = (torch.float32, torch.bfloat16)


class BackwardInFp32(Patched):
    formats = (torch.bfloat16, torch.float32)


class BackwardInFp16(Patched):
    formats = (torch.bfloat16, torch.float16)


class BiasInFp32(Patched):
    """Adds the bias in fp32, which is right."""

    def product(self, module, x):
        return (F.linear(x, module.weight).float() + module.bias).bfloat16()


def judged(backend):
    return compared_with_amp(backend, TASK, DATA, "bf16", steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (ForwardInFp32, "forward of layer1 (Linear) computes in fp32, where amp bf16 does in bf16"),
        (BackwardInFp32, "backward of layer1 (Linear) computes in fp32, where amp bf16 does in bf16"),
        (BackwardInFp16, "backward of layer1 (Linear) computes in fp16, where amp bf16 does in bf16"),
    ],
)
def test_a_product_in_another_format_is_another_precision(backend, words):
    verdict = judged(backend)
    assert (verdict.word, verdict.cause, verdict.because) == ("differs", "precision", words)


FORMATS = {"kind": "Linear", "weight": "fp32", "computes": "fp32", "backward": "fp32"}


@pytest.mark.parametrize(
    ("precision", "own", "reference", "declared", "failed"),
    [
        ("fp32", "bf16", "fp32", "fp32", ["other formats in layer1"]),
        ("fp32", "fp32+fp16", "fp32", "fp32", ["other formats in layer1"]),
        ("bf16", "fp16", "fp32", "fp32", ["other formats in layer1"]),
        ("fp32", "bf16", "bf16", "fp32", []),  # the network keeps this layer so
        ("fp32", "bf16", "fp32", "bf16", []),
        ("bf16", "bf16", "fp32", "fp32", []),
    ],
)
def test_weights_in_a_format_that_is_not_the_precisions_are_named(precision, own, reference, declared, failed):
    def run(weight, promises):
        nothing = Gradients(0.0, 0.0, 0.0)
        findings = Findings(precision, Recipe(1), 1, {}, Drive(), nothing, promises=Promises(weights=promises))
        return Examined("run", precision, {}, findings, None, layers={"layer1": {**FORMATS, "weight": weight}})

    case = Case(run(own, declared), run(reference, "fp32"))
    assert [check.name for check in dtype_checks(case) if not check.passed] == failed


class InBf16(torch.autograd.Function):
    """A loss that is computed in fp32, and whose gradient is multiplied in bf16."""

    @staticmethod
    def forward(ctx, output, y):
        with torch.enable_grad():
            ctx.leaf = output.detach().float().requires_grad_()
            ctx.loss = F.cross_entropy(ctx.leaf, y)
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx, grad):
        (found,) = torch.autograd.grad(ctx.loss, ctx.leaf)
        return found.bfloat16() * grad.bfloat16().expand(len(found), 1), None


class BackwardOfLossIn16Bits(Amp):
    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = self.model(x)
        self.loss = InBf16.apply(output, y)
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (layers.LossIn16Bits, "forward of softmax and loss computes in bf16, where amp bf16 does in fp32"),
        pytest.param(
            BackwardOfLossIn16Bits,
            "backward of softmax and loss computes in bf16, where amp bf16 does in fp32",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_loss_in_16_bits_is_found_by_its_dtype(backend, words):
    verdict = judged(backend)
    assert (verdict.word, verdict.cause, verdict.because) == ("differs", "loss", words)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Patched, BiasInFp32])
def test_a_product_in_the_precision_is_right_whatever_else_is_in_fp32(backend):
    verdict = judged(backend)
    assert verdict.word == "same", verdict.because
    assert any(check.name.startswith("backward of") for check in verdict.checks)


@pytest.mark.slow
def test_gradients_that_roundings_move_by_far_more_show_no_precision():
    amp = examined("amp", Amp, TASK, DATA, "bf16", steps=3)
    first = amp.findings.first.finite
    like_fp16 = replace(amp.findings.first, finite=replace(first, effective_precision="fp16"))
    worst = max(first.gradients, key=lambda name: first.gradients[name].relative)

    def word(part):
        """Returns the verdict where one rounding of each result moves a gradient by a share of itself."""
        moved = replace(amp.findings.replays["first"].rounding[worst], error=part * first.gradients[worst].norm)
        findings = replace(amp.findings, first=like_fp16, rounding={worst: moved}, replays={})
        run = replace(amp, findings=findings)
        return str(judge_run(run, run))

    assert word(0.05) == "differs: precision (asked for bf16, computes in fp16)"
    assert word(0.5) == "reference"


def test_gradients_that_are_right_in_the_forced_replay_show_no_other_precision():
    """A unit at its kink may turn in the oracle of the precision asked for, and not in another precision's oracle."""
    amp = examined("amp", Amp, TASK, DATA, "bf16", steps=3)
    first = replace(amp.findings.first, finite=replace(amp.findings.first.finite, effective_precision="fp16"))
    run = replace(amp, findings=replace(amp.findings, first=first))
    assert str(judge_run(run, run)) == "reference"


def of_the_output(output, targets):
    """A loss in the format of the network's output."""
    return (output.square().mean(1) - output.gather(1, targets[:, None]).squeeze(1)).mean()


@pytest.mark.slow
def test_a_loss_of_ones_own_computes_in_the_format_of_the_reference():
    task = replace(TASK, loss=of_the_output)
    amp = examined("amp", Amp, task, DATA, "bf16", steps=3)
    assert amp.result.training.dtypes["loss"] == "bf16"
    verdict = judge_run(amp, amp)
    assert verdict.word == "reference", verdict.because
    training = replace(amp.result.training, dtypes={**amp.result.training.dtypes, "loss": "fp32"})
    in_fp32 = replace(amp, result=replace(amp.result, training=training))
    assert str(judge_run(amp, in_fp32)) == "differs: loss"
