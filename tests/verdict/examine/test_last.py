"""Histograms of exponents, and the step that the step after training is compared with."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.mutations import subject_of
from support.tasks import make_task

from mpcompare.contract import Walk
from mpcompare.tasks.optimizers import Adam, Sgd
from mpcompare.tasks.task import params_of
from mpcompare.verdict.examine.forced.passes import recorded_step, unrecorded
from mpcompare.verdict.examine.last import _updates
from mpcompare.verdict.examine.new_step import new_step
from mpcompare.verdict.findings import LOWEST

CPU = torch.device("cpu")
TASK = make_task(in_features=40, samples=32 * 25)
DATA = dataset_of(TASK)


def test_histograms_are_of_the_baseline_only_and_count_every_element():
    found = examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=2, noise=1).findings
    for when in ("first", "last"):
        counts = found.exponents[when]
        activations, gradients = counts["activations"], counts["gradients of activations"]
        layers = ["layer1", "relu1", "layer2", "relu2", "layer3"]
        assert list(activations) == list(gradients) == layers
        for layer, width in zip(layers, (24, 24, 16, 16, 5), strict=True):
            assert sum(activations[layer]) == sum(gradients[layer]) == 32 * width
        assert activations["relu1"][0] > 0
        assert activations["layer1"][0] == 0
        params = {name: p.numel() for name, p in params_of(TASK.new_model(0, CPU)).items()}
        for group in ("gradients of weights", "updates"):
            assert {name: sum(numbers) for name, numbers in counts[group].items()} == params
    assert examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=2).findings.exponents == {}


def test_updates_are_those_of_clipped_gradients_and_adams_do_not_depend_on_their_size():
    w, g = {"w": torch.ones(4)}, {"w": torch.full((4,), 4.0)}
    for optimizer, clip_norm, exponent in ((Sgd(0.5), None, 1), (Sgd(0.5), 2.0, -2), (Adam(0.3), 2.0, -2)):
        counts = _updates(replace(TASK, optimizer=optimizer, clip_norm=clip_norm), w, g)["w"]
        assert counts.index(4) - 1 + LOWEST == exponent


class Products(torch.nn.Module):
    """Multiplies pairs of numbers: torch has two formulas for the derivative."""

    def __init__(self):
        super().__init__()
        self.hidden, self.output = torch.nn.Linear(40, 24), torch.nn.Linear(12, 5)

    def forward(self, x):
        return self.output(self.hidden(x).sigmoid().view(-1, 12, 2).prod(-1))


def test_the_step_that_is_recorded_and_the_new_step_have_the_same_derivatives():
    network = SimpleNamespace(task=replace(TASK, model=Products), dataset=DATA)
    subject = subject_of(network, "bf16", BACKENDS["master_weights"])
    backend = subject.make_backend(subject.model, subject.scaling)
    batch = subject.first_batch
    step = recorded_step(subject, subject.model, Walk(backend, batch, 0.1), batch)
    with unrecorded(backend):
        new = new_step(subject, subject.model, 1.0, batch, 0.1)
    assert step.record.calls
    assert all(torch.equal(g, new.grads[name]) for name, g in step.grads.items())
