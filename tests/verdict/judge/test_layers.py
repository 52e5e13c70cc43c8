"""Layers that are wrong are flagged and named, and a verdict is not green where nothing can be seen."""

import math
from dataclasses import replace

import pytest
import torch
from support.foreign import NETWORKS
from support.judging import dataset_of, examined
from support.mutations import layers_of, mutated, subject_of
from support.tasks import make_task
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.report.verdicts import examined_of, judge_run
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layer_causes import explained
from mpcompare.verdict.judge.layers import checks as layer_checks
from mpcompare.verdict.judge.layers import doubt
from mpcompare.verdict.judge.replayed import WHERE, said_of
from mpcompare.verdict.judge.sight import PLANTED, sight

MLP = make_task(in_features=20, hidden=[64], out_features=5, batch_size=64, samples=64 * 4)
TASK = replace(MLP, model=lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5)))
DATA = dataset_of(MLP)


class Capped(Amp):
    """Bends the logits to stay within 30."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.register_forward_hook(lambda _, __, output: 30 * (output / 30).tanh())


@pytest.fixture(scope="module")
def amp():
    return examined("amp", Amp, TASK, DATA, "bf16", steps=3, noise=2)


@pytest.mark.slow
def test_only_sharp_weights_show_a_soft_cap(amp):
    verdict = judge_run(examined("capped", Capped, TASK, DATA, "bf16", steps=3), amp)
    assert (verdict.word, verdict.cause) == ("differs", "forward pass"), verdict.because
    assert "the output of the network at sharp weights" in verdict.because
    assert {check.kind for check in verdict.checks if not check.passed} == {"sharp"}


@pytest.mark.parametrize(
    ("own", "reference", "because"),
    [
        ("bf16", "fp32", "topk in net.py:3 chooses by bf16 numbers in the first step, and the reference by fp32"),
        ("bf16", "bf16", None),
        ("fp32", "bf16", None),
        (None, "fp32", None),  # another code makes this choice
    ],
)
def test_who_chooses_by_fewer_digits_than_the_reference_is_named(amp, own, reference, because):
    def chose(kind, name):
        run = examined_of(amp)
        first = replace(run.findings.replays["first"], choices={"topk in net.py:3": kind} if kind else {})
        return replace(run, name=name, findings=replace(run.findings, replays={"first": first}))

    failed = [check for check in layer_checks(Case(chose(own, "run"), chose(reference, "amp"))) if not check.passed]
    assert [(check.cause, check.because) for check in failed] == ([("precision", because)] if because else [])


def test_a_place_whose_error_is_no_number_fails_wherever_it_stands(amp):
    reference = examined_of(amp)
    replays = reference.findings.replays
    outputs = [at for at in replays["first"].places if at.startswith("output ")]
    assert len(outputs) > 2
    for at in outputs:
        places = {**replays["first"].places, at: replace(replays["first"].places[at], error=math.nan)}
        first = replace(replays["first"], places=places)
        run = replace(reference, findings=replace(reference.findings, replays={"first": first}))
        failed = [check for check in layer_checks(Case(run, reference)) if not check.passed]
        assert [check.place for check in failed] == [said_of(at, WHERE["first"])]
        assert doubt(run).startswith(f"{failed[0].place} is itself nan % off")


def test_nan_in_backward_is_far_more_wrong_than_a_forward_that_rounds_a_little_more(amp):
    case, first = Case(examined_of(amp), examined_of(amp)), amp.findings.replays["first"]
    for size, named in ((9.0, "the output of 0"), (math.nan, "the gradient that arrives at 2")):
        excess = {"output 0": 3.0, "gradient 2": size, "gradient 0": 5.0}
        _, because, _ = explained(case, first, excess, WHERE["first"])
        assert because.startswith(f"{named} in the first step is")


def test_a_missing_gradient_is_named_where_the_reference_shows_no_layers(amp):
    reference = examined_of(amp)
    replay, gradients = reference.findings.replays["first"], amp.findings.first.gradients
    first = replace(replay, gradients={**replay.gradients, "2.weight": None})
    assert gradients["2.weight"].norm > 0
    run = replace(reference, findings=replace(reference.findings, replays={"first": first}))
    hidden = replace(reference, findings=replace(reference.findings, replays={}))
    failed = [check for check in layer_checks(Case(run, hidden)) if not check.passed]
    assert {(check.cause, check.tensor) for check in failed} == {("gradient missing", "2.weight")}


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


class HalvesTwice(Amp):
    """Halves what two layers pass down."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        for layer in (self.model[2], self.model[4]):
            layer.register_forward_pre_hook(lambda _, given: Halves.apply(given[0]))


@pytest.mark.slow
def test_of_two_wrong_gradients_the_first_in_backward_is_named():
    deeper = replace(
        MLP, model=lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    )
    right, run = (examined(each.__name__, each, deeper, DATA, "bf16", steps=2, noise=1) for each in (Amp, HalvesTwice))
    failed = [check for check in judge_run(run, right).checks if check.kind == "layers" and not check.passed]
    assert failed[0].cause == "input gradient"
    assert failed[0].because.startswith("the gradient that arrives at 3 in the first step is 50 % off")
    assert failed[0].because.endswith("what 4 passes down")


class OwnFactor(Amp):
    """Multiplies the loss by 3 in each micro-batch, and divides the gradients by 3."""

    divided_by = 3

    def backward(self):
        self.loss = self.loss * 3
        super().backward()

    def unscale(self):
        super().unscale()
        for p in self.model.parameters():
            p.grad /= self.divided_by


class ForgetsItsFactor(OwnFactor):
    divided_by = 1


@pytest.mark.slow
def test_a_factor_that_a_backend_divides_by_again_is_its_own(amp):
    verdict = judge_run(examined("own", OwnFactor, TASK, DATA, "bf16", steps=3), amp)
    assert verdict.word == "same", verdict.because
    verdict = judge_run(examined("forgets", ForgetsItsFactor, TASK, DATA, "bf16", steps=3), amp)
    assert (verdict.word, verdict.cause) == ("differs", "gradient scaled"), verdict.because


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5)
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.act(self.first(x))
        return self.last(self.left(x) + self.right(x))


class HalvesOneBranch(Amp):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.right.register_forward_pre_hook(lambda _, given: Halves.apply(given[0]))


@pytest.mark.slow
def test_every_branch_that_may_have_passed_down_a_wrong_gradient_is_named():
    fork = replace(MLP, model=Fork)
    right, run = (
        examined(each.__name__, each, fork, DATA, "bf16", steps=2, noise=1) for each in (Amp, HalvesOneBranch)
    )
    failed = [check for check in judge_run(run, right).checks if check.kind == "layers" and not check.passed]
    assert failed[0].because.startswith("the gradient that arrives at act in the first step is")
    assert failed[0].because.endswith("what left or right passes down")


def with_first(run, **changes):
    findings = run.findings
    first = replace(findings.replays["first"], **changes)
    return replace(run, findings=replace(findings, replays={**findings.replays, "first": first}))


def test_other_whole_numbers_fail_unless_the_reference_has_them_too(amp):
    def failed(run, reference):
        case = Case(examined_of(run), examined_of(reference))
        return [(check.tensor, check.cause) for check in layer_checks(case) if not check.passed]

    other = replace(with_first(amp, other_whole_numbers=["", "table"]), name="other")
    assert failed(other, amp) == [("", "forward pass"), ("table", "buffers")]
    assert failed(other, with_first(amp, other_whole_numbers=["table"])) == [("", "forward pass")]
    unseen = replace(amp, findings=replace(amp.findings, replays={}))
    assert failed(other, unseen) == [("", "forward pass")]  # a buffer may be moved again in a checkpoint


def test_a_gradient_that_is_missing_fails_in_its_layer_too(amp):
    first = amp.findings.replays["first"]
    name = next(iter(first.gradients))
    run = replace(with_first(amp, gradients={**first.gradients, name: None}), name="run")
    case = Case(examined_of(run), examined_of(amp))
    failed = [check for check in layer_checks(case) if not check.passed]
    assert [check.name for check in failed] == [f"gradient in the first step, {name}"]
    assert failed[0].cause == "gradient missing"


def test_a_verdict_is_not_green_where_nothing_is_seen(amp):
    same = judge_run(replace(amp, name="run"), amp)
    assert same.word == "same"
    assert same.sees.startswith("an error of 0.")
    assert same.sees.endswith(" % or more in a gradient would have been found")
    rounding = amp.findings.replays["first"].rounding
    coarse = {name: replace(e, error=30 * e.error) for name, e in rounding.items()}
    blind = judge_run(with_first(replace(amp, name="run"), rounding=coarse), amp)
    assert (blind.word, blind.cause) == ("not seen", "2.weight, 2.bias and 2 more")
    assert blind.because.startswith("an error of 10 % may hide in 2.weight, 2.bias and 2 more: ")
    assert "0 % of the numbers of the gradients are seen" in blind.because
    whole = replace(amp, findings=replace(amp.findings, replays={}, rounding=coarse))
    hidden = judge_run(replace(whole, name="run"), whole)
    assert hidden.because.startswith("no layers are seen, and an error of 10 % may hide in ")
    one = judge_run(with_first(replace(amp, name="run"), rounding={**rounding, "2.bias": coarse["2.bias"]}), amp)
    assert one.word == "same"  # 5 numbers of 1669


def test_gradients_that_are_0_but_for_roundings_are_not_seen(amp):
    """Roundings are the limit of such gradients, and an error as large as the gradient itself is below this limit."""
    first = amp.findings.replays["first"]
    large = {n: replace(r, error=1.1 * first.gradients[n].norm) for n, r in first.rounding.items()}
    run = with_first(replace(amp, name="run"), rounding=large)
    seen = sight(Case(examined_of(run), examined_of(amp)))
    assert (seen.vanishing, seen.unseen, seen.share) == (list(large), [], 0)
    assert judge_run(run, amp).word == "not seen"
    few = with_first(replace(amp, name="run"), rounding={**first.rounding, "2.bias": large["2.bias"]})
    assert judge_run(few, amp).word == "same"  # as in a bias before a batch norm
    assert sight(Case(examined_of(few), examined_of(amp))).vanishing == ["2.bias"]


def test_errors_that_are_planted_into_the_findings_are_flagged(amp, monkeypatch):
    run = replace(amp, name="run")
    assert set(PLANTED) == {"negated", "halved", "in another order"}
    case = Case(examined_of(run), examined_of(amp))
    assert sight(case).not_flagged == []
    monkeypatch.setitem(PLANTED, "as it is", lambda e: e)
    (words,) = sight(case).not_flagged
    assert words.endswith("taken as as it is")
    verdict = judge_run(run, amp)
    assert (verdict.word, verdict.cause) == ("not seen", "planted errors")
    assert words in verdict.because


def test_errors_are_planted_where_the_gradients_are_judged(amp):
    rounding = amp.findings.replays["first"].rounding
    coarse = {name: replace(e, error=1000 * e.error) for name, e in rounding.items()}
    run = with_first(replace(amp, name="run"), rounding=coarse, loss_is_replayed=False)
    run = replace(run, findings=replace(run.findings, rounding=rounding))  # the oracle judges the gradients
    seen = sight(Case(examined_of(run), examined_of(amp)))
    assert (seen.unseen, seen.not_flagged) == ([], [])


def test_a_reference_whose_own_error_is_large_is_named(amp):
    assert judge_run(amp, amp).because == ""
    gradients = amp.findings.replays["first"].gradients
    worse = {**gradients, "0.bias": replace(gradients["0.bias"], error=0.3 * gradients["0.bias"].norm)}
    verdict = judge_run(wrong := with_first(amp, gradients=worse), wrong)
    assert verdict.word == "reference"
    assert verdict.because == "the gradient of 0.bias in the first step is itself 30 % off, beyond what roundings make"


class OtherMomentum(Amp):
    """One batch norm of many weighs its batch by a tenth more."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.get_submodule("features.6.block.3.1").momentum *= 1.1


@pytest.mark.slow
def test_running_statistics_of_a_real_network_are_seen():
    network = next(network for network in NETWORKS if network.name == "mobilenet_v3_small")
    amp, run = (layers_of(subject_of(network, "bf16", backend), backend.__name__) for backend in (Amp, OtherMomentum))
    failed = [check for check in layer_checks(Case(run, amp)) if not check.passed]
    assert [check.cause for check in failed] == ["running statistics"]
    assert "the buffer features.6.block.3.1.running_" in failed[0].because
    assert not [check for check in layer_checks(Case(replace(amp, name="run"), amp)) if not check.passed]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "vit_tiny", "gpt2, tied"])
def test_mutations_of_real_networks_are_flagged_and_named(name, seed):
    network = next(network for network in NETWORKS if network.name == name)
    if network.library in ("timm", "transformers"):
        pytest.importorskip(network.library, reason=f"needs {network.library}: pip install '.[networks]'")
    found = list(mutated(network, "bf16", most=2, seed=seed))
    assert len(found) >= 10
    assert [each for each in found if not each.failed or not each.named] == []
