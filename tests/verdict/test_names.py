"""Bugs that once had a wrong name: the verdict tells their cause, in a sentence with a point."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from planted.groups import NO_DECAY
from planted.layers import RoundedWeights, variant
from planted.recipe import OtherAdam, adam
from planted.trained import LateAmp
from support.judging import dataset_of, examined
from support.marks import diagonal, slow_rows
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.scratch import Scratch
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Cosine, Warmup

MLP = make_task(samples=32 * 12)
ADAM = replace(MLP, optimizer=Adam(1e-3))
WARM = {"schedule": Warmup(4)}


class Gained(nn.Module):
    """A network that has a parameter itself."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 5)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        return self.last(nn.functional.gelu(self.first(x) * self.gain))


def normed():
    return nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 16), nn.GELU(), nn.Linear(16, 5))


NORMED, GAINED = replace(MLP, model=normed), replace(MLP, model=Gained)
WIDE = make_task(in_features=784, hidden=[64], out_features=10, batch_size=128, samples=1280, lr=0.05)


@cache
def amp(task, precision):
    return examined("amp", Amp, task, data(task), precision, steps=8)


@cache
def data(task):
    return digits(0, WIDE.samples) if task.batch_size == WIDE.batch_size else dataset_of(MLP)


def judged(backend, task, precision="bf16"):
    return judge_run(examined("run", backend, task, data(task), precision, steps=8), amp(task, precision))


# The optimizer, the schedule, and weights that stay as they are.


class MovesTogether(LateAmp):
    """Adds the mean of an update to each of its elements. No known mistake does so."""

    after = 3

    def step(self, lr):
        before = {p: p.detach().clone() for p in self.model.parameters()}
        super().step(lr)
        with torch.no_grad():
            for p, old in before.items() if self.late else ():
                p.add_((p - old).mean())


class BiasesStop(LateAmp):
    after = 3

    def step(self, lr):
        kept = {p: p.detach().clone() for name, p in self.model.named_parameters() if name.endswith("bias")}
        super().step(lr)
        with torch.no_grad():
            for p, old in kept.items() if self.late else ():
                p.copy_(old)


class NormsStand(BiasesStop):
    """Norms, which are 1 and 0, and biases stay from the first step on."""

    after = 0


class RateFromZero(Amp):
    """The rate is the rate of the update before, and 0 at first."""

    last = 0.0

    def step(self, lr):
        super().step(self.last)
        self.last = lr


class CapturedRate(Amp):
    """Every step has the rate of the first step, as in a graph that took the rate as a number."""

    first = None

    def step(self, lr):
        self.first = float(lr) if self.first is None else self.first
        super().step(self.first)


class CapturedCount(OtherAdam):
    """The bias correction stays as in the first update. The count goes on."""

    first = None

    def rule_of(self, rule, w, g, remembered, lr):
        now = int(remembered["step"])
        self.first = now if self.first is None else self.first
        remembered["step"].fill_(self.first)
        adam(rule, w, g, remembered, lr)
        remembered["step"].fill_(now + 1)


class ForgetsAll(OtherAdam):
    kinds = ("exp_avg", "exp_avg_sq")

    def rule_of(self, rule, w, g, remembered, lr):
        for kind in self.kinds:
            remembered[kind].zero_()
        adam(rule, w, g, remembered, lr)


class ForgetsTheMean(ForgetsAll):
    kinds = ("exp_avg",)


class MeanIsTheGradient(OtherAdam):
    """``m = g`` without a correction, as with beta1 = 0."""

    def rule_of(self, rule, w, g, remembered, lr):
        adam(replace(rule, betas=(0.0, rule.betas[1])), w, g, remembered, lr)


class DividesByTheRate(OtherAdam):
    """``m / (sqrt(v) / lr + eps / lr)``, as torch's compiled AdamW has it with a rate that is a tensor."""

    def rule_of(self, rule, w, g, remembered, lr):
        adam(rule, w, g, remembered, lr)
        if lr == 0:
            w.masked_fill_(remembered["exp_avg_sq"] == 0, torch.nan)


class UnscaledTwice(Scratch):
    """The optimizer divides gradients by the loss scale that are unscaled already."""

    def factor(self):
        return 1 / self.scaling.scale

    def step(self, lr):
        shown = {name: g.clone() for name, g in self.unscaled.items()}
        for g in self.unscaled.values():
            g.mul_(self.factor())
        super().step(lr)
        self.unscaled = shown


class Doubled(UnscaledTwice):
    def factor(self):
        return 2.0


ADAMW_GROUPS = {"optimizer": AdamW(1e-3, weight_decay=0.1, groups=[NO_DECAY])}
LR_GROUPS = {"optimizer": Sgd(0.05, groups=[{"match": "layer2.*", "lr_factor": 0.1}])}


QUICK = [
    (BiasesStop, replace(MLP, **ADAMW_GROUPS, **WARM), "bf16", "update left out", "layer1.bias as it is"),
    (UnscaledTwice, MLP, "fp16", "gradient scaled", "divided by the loss scale once more"),
]
SLOW = [
    (CapturedCount, ADAM, "bf16", "bias correction", "bias correction of the first update"),
    (ForgetsAll, ADAM, "bf16", "moments", "this gradient alone"),
    (RateFromZero, replace(NORMED, **WARM), "bf16", "schedule", "the first one at 0"),
    (CapturedRate, replace(ADAM, **WARM), "bf16", "schedule", "rate of the first update"),
    (DividesByTheRate, replace(WIDE, optimizer=Adam(1e-3), schedule=Cosine(8)), "bf16", "optimizer", "which is NaN"),
    (Doubled, ADAM, "fp16", "gradient scaled", "multiplied by a power of two"),
    (MovesTogether, ADAM, "bf16", "optimizer", "times what its gradients make"),
    (NormsStand, NORMED, "bf16", "update left out", "leaves 0.bias as it is"),
    (BiasesStop, replace(MLP, **ADAMW_GROUPS, schedule=Cosine(8, 2)), "bf16", "update left out", "as it is"),
    (variant(RoundedWeights, layer="0"), NORMED, "bf16", "no master weights", "0.weight has the digits"),
    (CapturedRate, replace(MLP, **LR_GROUPS, schedule=Warmup(8)), "fp16", "schedule", "rate of the first update"),
    (ForgetsTheMean, ADAM, "bf16", "moments", "this gradient alone"),
    (MeanIsTheGradient, ADAM, "bf16", "moments", "this gradient alone"),
    (UnscaledTwice, ADAM, "fp16", "gradient scaled", "divided by the loss scale once more"),
    (Doubled, ADAM, "bf16", "gradient scaled", "multiplied by a power of two"),
]


@pytest.mark.parametrize(
    ("backend", "task", "precision", "cause", "words"),
    [*QUICK, *slow_rows(SLOW)],
)
def test_a_wrong_update_is_named_by_what_makes_it(backend, task, precision, cause, words):
    verdict = judged(backend, task, precision)
    assert (verdict.word, verdict.cause) == ("differs", cause), verdict.because
    assert words in verdict.because


# Gradients.


class ThreeBits(Amp):
    """The gradient of one parameter has three bits."""

    name = ""

    def backward(self):
        super().backward()
        g = self.model.get_parameter(self.name).grad
        digits, exponents = torch.frexp(g)
        g.copy_(torch.ldexp((digits * 8).round() / 8, exponents))


@pytest.mark.slow
@diagonal(1, name=["layer1.weight", "gain"], precision=["bf16", "fp16"])
def test_one_wrong_parameter_is_no_gradient_that_is_passed_down(name, precision):
    task = GAINED if name == "gain" else MLP
    verdict = judged(variant(ThreeBits, name=name), task, precision)
    assert (verdict.word, verdict.cause) == ("differs", "products"), verdict.because
    assert verdict.because.startswith(f"only gradients of {name} are wrong")


class PassesDown(Amp):
    """The gradient that the last layer passes down is a tenth off."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.last.register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(self.spoilt) and None)

    def spoilt(self, g):
        return g * (1 + 0.1 * torch.randn(g.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.slow
def test_a_parameter_of_the_network_itself_has_a_layer_that_can_be_named():
    verdict = judged(PassesDown, GAINED)
    assert verdict.cause == "input gradient", verdict.because
    assert "the gradient that arrives at first" in verdict.because
    assert verdict.because.endswith("what last passes down")


class FirstLayerInTheOther(Amp):
    """The first layer computes in the other 16-bit format, and says nothing of it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        other = torch.float16 if self.precision == "bf16" else torch.bfloat16
        plain = self.model.layer1.forward

        def forward(x):
            with torch.autocast("cpu", dtype=other):
                return plain(x)

        self.model.layer1.forward = forward

    def module_dtypes(self, x, y):
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_operands_in_the_other_format_of_16_bits_are_another_precision(precision):
    verdict = judged(FirstLayerInTheOther, WIDE, precision)
    assert (verdict.word, verdict.cause) == ("differs", "precision"), verdict.because
    assert verdict.because.endswith("the gradients are as in " + {"bf16": "fp16", "fp16": "bf16"}[precision])


class ClipsInWords(Amp):
    """A step in one piece that says the norm, and does not clip."""

    def train_step(self, batches, lr):
        for x, y in batches:
            loss = self.forward(x, y)
            self.backward()
        self.unscale()
        self.shown = super().grads()
        self.grad_norm = torch.cat([g.flatten() for g in self.shown.values()]).norm()
        self.step(lr)
        self.shown = {name: g.clone() for name, g in self.shown.items()}
        self.update()
        return loss

    def grads(self):
        return self.shown


@pytest.mark.slow
def test_gradients_that_are_not_clipped_at_sharp_weights_alone_are_named():
    verdict = judged(ClipsInWords, replace(NORMED, clip_norm=3.0))
    assert (verdict.word, verdict.cause) == ("differs", "clip"), verdict.because
    assert "the gradients of the first step are right, and at sharp weights" in verdict.because
    assert verdict.because.endswith("over clip_norm, they are not clipped")
