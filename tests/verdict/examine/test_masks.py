"""The masks of a backend: the oracle's masks, or others, of which the verdict says what it can."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from planted.dropout import DROPOUT
from planted.judged import reference
from support.backends import BACKENDS
from support.judging import examined
from support.marks import slow_after
from support.tasks import make_task
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.data.generated import synthetic
from mpcompare.tasks.draws import MaskedDropout
from mpcompare.tasks.losses import MaskedCrossEntropy
from mpcompare.verdict.examine.masks import _exact_samples, _slope
from mpcompare.verdict.judge.masks import Masks


class OtherMasks(Amp):
    """``amp`` that draws a number before its network does, so that it has other masks, which are right, too."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch.rand(())
        return super().forward(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("functions", slow_after(1, [False, True]))
def test_a_backend_of_other_dtypes_draws_the_same_masks(functions):
    task, dataset, amp = reference(DROPOUT, "bf16", functions=functions)
    assert amp.findings.masks == Masks(training=True)
    run = examined("master_weights", BACKENDS["master_weights"], task, dataset, "bf16", steps=DROPOUT.steps)
    assert run.findings.masks == Masks(training=True)
    verdict = judge_run(run, amp)
    assert (verdict.word, verdict.unchecked) == ("same", [])
    assert {check.kind for check in verdict.checks} >= {"layers", "later steps", "resume", "run"}


@pytest.mark.slow
def test_a_backend_with_masks_of_its_own_is_not_accused_and_what_was_not_checked_is_said():
    task, dataset, amp = reference(DROPOUT, "bf16", functions=False)
    run = examined("other", OtherMasks, task, dataset, "bf16", steps=DROPOUT.steps)
    draws = run.findings.masks
    assert not draws.training
    assert run.findings.first.gradients == {}
    assert len(set(draws.samples.losses)) == 2
    assert len(draws.samples.exact_losses) == len(draws.samples.exact_slopes) == 8
    verdict = judge_run(run, amp)
    assert verdict.word == "within noise", verdict.because
    assert verdict.unchecked == [
        "gradients in the first step",
        "each layer by itself (aten::bernoulli_.float drew other random numbers in the step)",
        "training (it draws other random numbers, such as masks of dropout)",
    ]
    assert {c.kind for c in verdict.checks} >= {"masks", "optimizer", "later steps", "resume"}
    assert not {c.kind for c in verdict.checks} & {"gradients", "run"}
    # As the reference, this run is no measure of gradients either. The replay of amp has the masks of amp.
    amp_beside_it = judge_run(amp, replace(run, findings=replace(run.findings, noise=amp.findings.noise)))
    assert amp_beside_it.word == "same", amp_beside_it.because
    assert "training (it draws other random numbers, such as masks of dropout)" in amp_beside_it.unchecked
    assert {c.kind for c in amp_beside_it.checks} >= {"layers"}
    assert not {c.kind for c in amp_beside_it.checks} & {"gradients", "run"}


def test_the_network_weighs_micro_batches_by_their_labels():
    x = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(4).repeat(8, 1)
    y[:4, 1:] = -100
    network, task = torch.nn.Linear(3, 4), SimpleNamespace(loss_fn=MaskedCrossEntropy())
    whole, parts = (
        _exact_samples(SimpleNamespace(network=lambda: network, task=task, first_batch=batch))
        for batch in ([(x, y)], [(x[:4], y[:4]), (x[4:], y[4:])])
    )
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    torch.testing.assert_close(parts["direction"], whole["direction"])


def test_a_layer_that_some_steps_leave_out_has_a_part_in_the_mean_gradient():
    class Layerdrop(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.last = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.Linear(4, 1)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x).tanh() if torch.rand(()) < 0.5 else x
            return self.last(x)

    torch.manual_seed(0)
    network, batch = Layerdrop(), [(torch.randn(32, 4), torch.randn(32, 1))]
    subject = SimpleNamespace(network=lambda: network, task=make_task(loss="mse"), first_batch=batch)
    found = _exact_samples(subject)
    assert set(found["direction"]) == {name for name, _ in network.named_parameters()}
    assert sum(found["slopes"]) / 8 == pytest.approx(1, abs=0.2)
    half = {name: g / 2 for name, g in found["direction"].items()}
    assert _slope(half, found["direction"]) == pytest.approx(0.5)
    del half["last.weight"]
    assert 0 < _slope(half, found["direction"]) < 0.5
    assert math.isnan(_slope({}, found["direction"]))


@pytest.mark.slow
def test_a_network_that_draws_nothing_says_nothing_of_masks():
    task = make_task()
    run = examined("amp", Amp, task, synthetic(0, 96, 20, 5, "cross_entropy"), "bf16", steps=2)
    assert run.findings.masks is None


def test_the_examined_network_has_masks_that_all_backends_draw_alike():
    task, _ = DROPOUT.make(functions=False)
    model = task.new_model(0, torch.device("cpu"))
    assert not any(isinstance(m, MaskedDropout) for m in model.modules())
