"""Recorded steps and their forced replays."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from support.backends import BACKENDS
from support.foreign import Network, ids, images
from support.marks import BF16_LSTM, diagonal
from support.mutations import layers_of, subject_of
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from mpcompare.backends.amp import Amp
from mpcompare.contract import Walk
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.draws import seed_step
from mpcompare.tasks.images import MnistCnn
from mpcompare.tasks.text import CharGpt, CharLstm
from mpcompare.verdict.examine.forced import step
from mpcompare.verdict.examine.forced.arithmetic import Arithmetic
from mpcompare.verdict.examine.forced.choices import in_backward
from mpcompare.verdict.examine.forced.known import KnownLayers
from mpcompare.verdict.examine.forced.places import Errors
from mpcompare.verdict.examine.forced.random_numbers import Fed, Noted, NotReplayedError
from mpcompare.verdict.examine.forced.record import OUTPUT
from mpcompare.verdict.examine.forced.recorder import Recorder, recorded
from mpcompare.verdict.examine.forced.replay import Recorded, Replay
from mpcompare.verdict.examine.forced.rows import factor_of
from mpcompare.verdict.examine.forced.samples import MOST
from mpcompare.verdict.examine.forced.step import compared_with_the_replay
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.layers import checks as layer_checks
from mpcompare.verdict.judge.layers import doubt
from mpcompare.verdict.judge.sight import sight


class Branches(nn.Module):
    """A residual branch, a layer that is called twice and returns a tuple, a parameter of no layer, dropout in a layer
    and in a function, relu in place, a mask of infinities, and a constant."""

    class Split(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

        def forward(self, x):
            y = x @ self.weight
            return y, y.tanh()  # the second result is made of the first

    class Positions(nn.Module):
        @torch.no_grad()
        def forward(self, x):
            return (torch.arange(x.shape[1]).float() * 0.3).cos().to(x.dtype)

    def __init__(self, width=32):
        super().__init__()
        self.first, self.split, self.last = nn.Linear(784, width), self.Split(width), nn.Linear(width, 10)
        self.relu, self.dropout, self.positions = nn.ReLU(inplace=True), nn.Dropout(0.2), self.Positions()
        self.gain = nn.Parameter(torch.ones(width))
        self.norm, self.same = nn.LayerNorm(width), nn.Identity()

    def forward(self, x):
        x = self.relu(self.first(x.flatten(1))) * self.gain
        a, b = self.split(x)
        x = self.norm(x + a * 0.5 + b) + self.positions(x)
        c, _ = self.split(self.dropout(self.same(x)))
        scores = (x @ c.mT / 6).masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
        return self.last(F.dropout(x, 0.1) + scores.softmax(-1) @ x)


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.first, self.last = reentrant, nn.Linear(784, 32), nn.Linear(32, 10)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32))

    def forward(self, x):
        x = self.first(x.flatten(1))
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Shared(nn.Module):
    """A layer that is called 24 times: autocast makes one copy of it, whose gradient is summed in 16 bits."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for _ in range(24):
            x = self.again(x).tanh() + x / 2
        return self.last(x)


class Equilibrium(nn.Module):
    """Looks for a fixed point without gradients, and takes one more step with them."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def step(self, x, z):
        return torch.tanh(self.again(z) / 2 + x)

    def forward(self, x):
        x = self.first(x.flatten(1))
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = self.step(x, z)
        return self.last(self.step(x, z))


class Waves(nn.Module):
    """Multiplies complex numbers, of the format that it asks for."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(784, 32), nn.Linear(16, 10)
        self.real, self.imaginary = (nn.Parameter(torch.randn(32, 16) / 6) for _ in range(2))

    def forward(self, x):
        weight = torch.complex(self.real.float(), self.imaginary.float())
        with torch.autocast("cpu", enabled=False):
            return self.last((self.first(x.flatten(1)).to(torch.complex64) @ weight).abs())


class Normalized(nn.Module):
    """Works on its input before the first layer: four operations, each of which has a result."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(784, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = (x.flatten(1) - 0.3) / 0.7
        return self.last(self.first(x * torch.sigmoid(x)).tanh())


class Frequencies(nn.Module):
    """Sines and cosines of large angles: one rounding of an angle is many of its sine's."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 10)

    def forward(self, x):
        angles = 300 * x.flatten(1)[:, 400:416]
        return self.last(self.first(angles.sin() + angles.cos()).tanh())


class Averaged(nn.Module):
    """An average over positions, below which the gradients of all positions are equal."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.first(x).mean((2, 3)))


class Hooked(nn.Module):
    """A layer on which its author put a hook, and a list that a hook of another layer writes into."""

    def __init__(self, hook):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(784, 32), nn.Conv1d(32, 32, 1), nn.Linear(32, 10)
        self.kept = []
        kept = self.kept
        self.first.register_forward_hook(lambda _, __, y: kept.append(y))
        hook(self.again)

    def forward(self, x):
        self.kept.clear()
        y = self.again(self.first(x.flatten(1)).tanh().unsqueeze(-1)).squeeze(-1).tanh()
        (first,) = self.kept
        return self.last(y + first / 2)


OWN_HOOKS = {
    "spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "before": lambda layer: layer.register_forward_pre_hook(lambda _, x: (2 * x[0],)),
    "after": lambda layer: layer.register_forward_hook(lambda _, __, y: 2 * y),
    "backward": lambda layer: layer.register_full_backward_hook(lambda _, dx, __: (dx[0] / 2,)),
}


class Hyper(nn.Module):
    """A layer whose weights another layer computes."""

    def __init__(self):
        super().__init__()
        self.first, self.makes = nn.Linear(784, 16), nn.Linear(16, 16 * 8 + 8)
        self.made, self.last = nn.Linear(16, 8).requires_grad_(False), nn.Linear(8, 10)

    def forward(self, x):
        x = self.first(x.flatten(1)).tanh()
        weight, bias = self.makes(x).mean(0).split([128, 8])
        return self.last(functional_call(self.made, {"weight": weight.view(8, 16), "bias": bias}, (x,)).tanh())


class Experts(nn.Module):
    """Each row goes to two of four experts, whose probabilities are nearly equal. A rounding of these sends rows to
    other experts."""

    def __init__(self, near):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(784, 32), nn.Linear(32, 4), nn.Linear(32, 10)
        self.experts, self.near = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), near

    def forward(self, x):
        x = self.first(x.flatten(1)).tanh()
        shares, which = (self.gate(x).float() * self.near).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(which == number)
            y = y.index_add(0, row, (shares[row, place, None] * expert(x[row])).to(y.dtype))
        return self.last(x + y)


def gray(samples):
    return images(28, 1, samples)


BOTH = ("bf16", "fp16")
NETWORKS = [
    Network("branches", "here", Branches, gray, BOTH),
    Network("recomputed", "here", lambda: Recomputed(False), gray, BOTH),
    Network("recomputed, reentrant", "here", lambda: Recomputed(True), gray, BOTH),
    Network("shared", "here", Shared, gray, BOTH),
    Network("equilibrium", "here", Equilibrium, gray, BOTH),
    Network("waves", "here", Waves, gray, BOTH),
    Network("cnn", "here", lambda: MnistCnn(4), gray, ("bf16",)),
    Network("lstm", "here", lambda: CharLstm(64, 12), ids, ("bf16",)),
    Network("gpt", "here", lambda: CharGpt(64, 24, 32, 2, 2), ids, BOTH),
]


def marks_of(network, precision="bf16"):
    return [BF16_LSTM] if (network.name, precision) == ("lstm", "bf16") else []


def cases():
    """Yields each network in each precision. Most networks are quick in bf16. The first network is quick in fp32,
    too."""
    slow = ("recomputed, reentrant", "shared", "lstm", "gpt")
    for network in NETWORKS:
        for precision in (*network.precisions, "fp32"):
            quick = network.name not in slow if precision == "bf16" else (network, precision) == (NETWORKS[0], "fp32")
            marks = [*marks_of(network, precision), *([] if quick else [pytest.mark.slow])]
            yield pytest.param(network, precision, id=f"{network.name} {precision}", marks=marks)


CASES = list(cases())
EVERY = [pytest.param(n, id=n.name, marks=marks_of(n)) for n in NETWORKS]


def backend_of(precision):
    return BACKENDS["fp32" if precision == "fp32" else "amp"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", BOTH)
def test_work_on_inputs_of_16_bits_is_rounded(precision):
    """The batch of ``master_weights`` has 16 bits, and so has all that is made of it. The batch of autocast is fp32."""
    network = Network("normalized", "here", Normalized, gray, BOTH)
    run, amp = (layers_of(subject_of(network, precision, BACKENDS[name]), name) for name in ("master_weights", "amp"))
    checks = list(layer_checks(Case(run, replace(amp, findings=replace(amp.findings, replays={})))))
    assert max(check.value / check.limit for check in checks if check.limit) <= 0.8
    at_first, of_amp = (each.findings.replays["first"].places["input first"] for each in (run, amp))
    assert at_first.error > run.unit_roundoff / 2 * at_first.norm
    assert of_amp.rounding < run.unit_roundoff / 100 * of_amp.norm


@pytest.mark.parametrize(("dtype", "number"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_numbers_that_were_drawn_in_16_bits_are_operands(dtype, number):
    drawn, operands = {}, []

    def operand(numbers):
        operands.append(numbers.tolist())
        return numbers

    torch.manual_seed(0)
    with Noted(drawn):
        mask = torch.empty(8, dtype=dtype).bernoulli_(0.5)
    torch.manual_seed(0)
    with Fed(drawn, operand):
        again = torch.empty(8, dtype=torch.float64).bernoulli_(0.5)
    assert torch.equal(again, mask.double())
    assert operands == number * [mask.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("network", [Frequencies, Averaged])
def test_a_right_step_in_fp32_is_not_in_doubt(network):
    run = layers_of(subject_of(Network("right", "here", network, gray, ()), "fp32", BACKENDS["fp32"]), "run")
    assert doubt(run) == ""


@pytest.mark.parametrize("network", EVERY)
def test_recording_changes_no_bit(network):
    subject = subject_of(network, "bf16", Amp)
    batch, found = next(subject.batches()), []
    for record in (False, True):
        backend = subject.make_backend(subject.model, subject.scaling)
        seed_step(1)
        walk = Walk(backend, batch, 0.1)
        if record:
            with recorded(backend.model) as calls:
                walk.through("unscale")
        else:
            walk.through("unscale")
        found.append((walk.loss, copy.deepcopy(backend.grads())))
    (loss, grads), (again, same) = found
    assert torch.equal(loss, again)
    assert grads.keys() == same.keys()
    assert all(torch.equal(g, same[name]) for name, g in grads.items())
    assert len(calls.calls[OUTPUT]) == 1
    assert not any(handles for m in backend.model.modules() for handles in (m._forward_hooks, m._forward_pre_hooks))


@pytest.mark.parametrize(("network", "precision"), CASES)
def test_a_right_step_is_within_its_roundings_everywhere(network, precision):
    run = layers_of(subject_of(network, precision, backend_of(precision)), "run")
    found = run.findings.replays["first"]
    names = {at.partition(" ")[2] for at in found.places}
    called = {n for n, m in network.make().named_modules() if n and not any(True for _ in m.children())}
    assert called - names <= {"same"}  # a module that hands on its input as it is, is no layer
    assert found.gradients.keys() == dict(network.make().named_parameters()).keys()
    case = Case(run, replace(run, name="reference"))
    checks = list(layer_checks(case))
    assert len(checks) > len(found.gradients)
    # Compared with itself a run is at half of its limit at most. So roundings alone are the limit here.
    alone = replace(run, name="none", findings=replace(run.findings, replays={}))
    assert doubt(run) == ""
    if network.name != "cnn" and precision != "fp32":  # how a convolution sums its terms depends on the CPU
        for check in layer_checks(Case(run, alone)):
            assert check.value <= 0.8 * check.limit, check
    seen = sight(case)
    assert seen is not None
    assert seen.enough, seen


@pytest.mark.slow
@diagonal(3, hook=list(OWN_HOOKS), precision=["bf16", "fp32"])
def test_a_layer_with_hooks_is_within_its_roundings(hook, precision):
    network = Network(hook, "here", lambda: Hooked(OWN_HOOKS[hook]), gray, BOTH)
    run = layers_of(subject_of(network, precision, backend_of(precision)), "run")
    assert doubt(run) == ""
    alone = replace(run, name="none", findings=replace(run.findings, replays={}))
    assert all(check.passed for check in layer_checks(Case(run, alone)))
    seen = sight(Case(run, replace(run, name="reference")))
    assert seen is not None
    assert seen.enough, seen


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_layer_whose_weights_are_computed_is_within_its_roundings(precision):
    run = layers_of(subject_of(Network("hyper", "here", Hyper, gray, BOTH), precision, backend_of(precision)), "run")
    assert doubt(run) == ""
    assert set(run.findings.replays["first"].gradients) == {
        f"{n}.{p}" for n in ("first", "makes", "last") for p in ("weight", "bias")
    }
    alone = replace(run, name="none", findings=replace(run.findings, replays={}))
    assert all(check.passed for check in layer_checks(Case(run, alone)))


@pytest.mark.slow
def test_a_replay_that_sends_rows_to_other_experts_is_no_sample(monkeypatch):
    paths = []
    take = Replay.take

    def noted(self, calls):
        paths.append("other")
        loss = take(self, calls)
        paths[-1] = "own"
        return loss

    monkeypatch.setattr(Replay, "take", noted)
    monkeypatch.setattr(Recorder, "chose", lambda *_: None)
    run = layers_of(subject_of(Network("experts", "here", lambda: Experts(0.2), gray, BOTH), "bf16", Amp), "run")
    assert "other" in paths
    assert paths[0] == paths[-1] == "own"
    assert paths.count("own") == 6  # the exact replay, four samples, and the replay for the sizes of terms
    assert doubt(run) == ""


@pytest.mark.slow
def test_more_samples_are_all_of_them_though_some_would_do(monkeypatch):
    """Sampling that stops as soon as the roundings look small would make them too small."""
    looked = iter([True, False, False])
    monkeypatch.setattr(Errors, "blind", lambda _: next(looked))
    run = layers_of(subject_of(NETWORKS[0], "bf16", Amp), "run")
    assert {place.samples for place in run.findings.replays["first"].places.values()} == {MOST}


def test_rows_that_every_rounding_sends_to_other_experts_go_where_the_step_sent_them():
    run = layers_of(subject_of(Network("experts", "here", lambda: Experts(1e-3), gray, BOTH), "bf16", Amp), "run")
    assert doubt(run) == ""
    alone = replace(run, name="none", findings=replace(run.findings, replays={}))
    assert all(check.passed for check in layer_checks(Case(run, alone)))
    seen = sight(Case(run, run))
    assert seen.blind == []


def test_rows_whose_choice_nobody_noted_are_said(monkeypatch):
    monkeypatch.setattr(Recorder, "chose", lambda *_: None)
    subject = subject_of(Network("experts", "here", lambda: Experts(1e-3), gray, BOTH), "bf16", Amp)
    with pytest.raises(NotReplayedError, match="^other rows come to experts.0 when the network is called again$"):
        layers_of(subject, "run")


@pytest.mark.slow
def test_sums_of_convolutions_in_16_bits_are_among_their_roundings():
    """A CPU without kernels for fp16 adds up the gradient of a convolution's weight in that format."""
    network = Network("cnn", "here", lambda: MnistCnn(4), gray, ("fp16",))
    run = layers_of(subject_of(network, "fp16", Amp), "run")
    alone = replace(run, name="none", findings=replace(run.findings, replays={}))
    assert all(check.passed for check in layer_checks(Case(run, alone)))


@pytest.mark.slow
def test_masks_are_fed_to_the_replay():
    run = layers_of(subject_of(NETWORKS[0], "bf16", Amp), "run")
    place = run.findings.replays["first"].places["output dropout"]
    assert place.error <= 2.0**-8 * place.norm  # with another mask the error would be as large as the output


def test_layers_that_need_no_gradient_round_what_they_store():
    def frozen():
        network = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10))
        return network.requires_grad_(False).append(nn.Linear(10, 10))

    first = layers_of(subject_of(Network("frozen", "here", frozen, gray), "bf16", Amp), "amp").findings.replays["first"]
    for name in ("1", "2", "3"):
        place = first.places[f"output {name}"]
        assert 0.5 * place.error < place.rounding < 2.0**-8 * place.norm


def test_a_layer_may_say_by_a_property_that_it_writes_nothing():
    class Activation(nn.Module):
        inplace = property(lambda self: False)

        def forward(self, x):
            return F.gelu(x)

    def make():
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), Activation(), nn.Linear(8, 10))

    first = layers_of(subject_of(Network("property", "here", make, gray), "bf16", Amp), "amp").findings.replays["first"]
    assert first.places["output 2"].error <= 2.0**-8 * first.places["output 2"].norm


class Faint(nn.Module):
    """Positions that no layer owns. Their gradients are the last digit of fp16 at a loss scale of 65536."""

    def __init__(self):
        super().__init__()
        self.positions, self.last = nn.Parameter(torch.randn(28, 28) * 0.02), nn.Linear(784, 10)

    def forward(self, x):
        return self.last((x + 5e-10 * self.positions.to(x.dtype)).flatten(1))


@pytest.mark.slow
def test_zeros_of_numbers_too_small_for_fp16_are_foreseen():
    network = Network("faint", "here", Faint, gray)
    right, run = (layers_of(subject_of(network, "fp16", BACKENDS[n]), n) for n in ("amp", "master_weights"))
    foreseen = right.findings.replays["first"].rounding["positions"].zeros
    assert foreseen > 0.05
    zeros = [c for c in layer_checks(Case(run, right)) if c.name.startswith("zeros") and "positions" in c.name]
    assert all(c.passed and c.limit > 0.1 * 784 for c in zeros)
    assert right.findings.replays["first"].rounding["last.weight"].zeros < 0.01


class ClassToken(nn.Module):
    """A parameter that no layer owns, and that nothing rounds on its way to a norm."""

    def __init__(self):
        super().__init__()
        self.token, self.embed = nn.Parameter(torch.randn(1, 1, 32)), nn.Linear(28, 32)
        self.norm, self.last = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.embed(x.squeeze(1))
        return self.last(self.norm(torch.cat([self.token.expand(len(x), -1, -1).to(x.dtype), x], dim=1))[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amp", "master_weights"])
def test_a_class_token_is_taken_as_it_was_held(name):
    run = layers_of(subject_of(Network("token", "here", ClassToken, gray), "bf16", BACKENDS[name]), "run")
    place = run.findings.replays["first"].places["input norm"]
    held = run.findings.replays["first"].places["output embed"].rounding
    assert place.error <= {"amp": held, "master_weights": 0.0}[name]


class Keys(nn.Module):
    """An attention. A constant added to all keys changes nothing, so the gradient of their bias cancels."""

    def __init__(self):
        super().__init__()
        self.embed, self.q, self.k = nn.Linear(28, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        x = self.embed(x.squeeze(1))
        q, k = (layer(x).unflatten(-1, (2, 16)).transpose(1, 2) for layer in (self.q, self.k))
        scores = (q @ k.mT).softmax(-1).sum(1)
        return self.last((scores @ x).mean(1))


@pytest.mark.slow
def test_a_gradient_that_cancels_is_seen_where_its_terms_were_recorded():
    run = layers_of(subject_of(Network("keys", "here", Keys, gray), "bf16", Amp), "amp")
    first = run.findings.replays["first"]
    e, rounding = first.gradients["k.bias"], first.rounding["k.bias"]
    assert e.norm < 2.0**-8 * rounding.terms
    assert e.error <= rounding.error * 2 <= 2.0**-7 * e.norm


def test_roundings_of_a_kernel_are_known_where_a_part_of_it_is_used(monkeypatch):
    # As on a CPU with kernels for 16 bits. Without such kernels a convolution is summed in 16 bits, which rounds more.
    monkeypatch.setattr(step, "convolves_in", lambda storage, device: torch.float32)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(784, 96), nn.Unflatten(1, (96, 1, 1)), nn.Conv2d(96, 96, 3, padding=1))
    network = Network("one pixel", "here", lambda: nn.Sequential(*wide, nn.Flatten(), nn.Linear(96, 10)), gray)
    first = layers_of(subject_of(network, "bf16", Amp), "amp").findings.replays["first"]
    e = first.gradients["3.weight"]
    assert e.error <= 2 * first.rounding["3.weight"].error <= 2.0**-7 * e.norm


def test_no_gradients_are_lost_behind_layers_that_detach():
    class Detaches(Amp):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            forward = self.model.norm.forward
            self.model.norm.forward = lambda x: forward(x).detach()

    run = layers_of(subject_of(NETWORKS[0], "bf16", Detaches), "run")
    assert run.findings.replays["first"].detached == ["norm"]
    right = layers_of(subject_of(NETWORKS[0], "bf16", Amp), "amp")
    failed = [check for check in layer_checks(Case(run, right)) if not check.passed]
    assert failed[0].cause == "gradient missing"
    assert "norm" in failed[0].because


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_work_between_layers_that_is_computed_again_is_rounded_as_it_was(reentrant, monkeypatch):
    """Else a layer would be called with other numbers the second time, and its roundings would be taken for 0."""
    monkeypatch.setattr(KnownLayers, "keep", lambda *_: None)  # the layers of a checkpoint are computed again

    class Again(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10)
            self.again = again

        def block(self, x):
            return self.third(F.gelu(self.second(F.gelu(x))))

        def forward(self, x):
            x = self.first(x.flatten(1))
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.again else self.block(x)

    found = []
    for again in (False, True):
        network = Network("again", "here", lambda again=again: Again(again), gray)
        found.append(layers_of(subject_of(network, "bf16", Amp), "amp").findings.replays["first"].rounding)
    plain, again = ({name: e.error for name, e in each.items()} for each in found)
    assert again == pytest.approx(plain)
    assert min(plain.values()) > 0


def test_a_layer_is_known_that_is_called_again_with_other_last_digits():
    """A product may have other last digits if its operands lie elsewhere in memory. So may its rounded result."""

    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10)

        def block(self, x):
            x = self.second(x) * (1 + 2.0**-22 * in_backward())
            return self.third(F.gelu(x))

        def forward(self, x):
            return checkpoint(self.block, self.first(x.flatten(1)), use_reentrant=True)

    run = layers_of(subject_of(Network("elsewhere", "here", Elsewhere, gray), "bf16", Amp), "run")
    places = run.findings.replays["first"].places
    assert places["gradient second"].samples >= 4
    assert places["gradient second"].far < 3
    assert doubt(run) == ""


class AddsInPlace(nn.Module):
    """A layer of the user's own that writes into its input."""

    def forward(self, x):
        return x.add_(1)


def test_a_replay_is_freed_when_it_is_over():
    """Otherwise it would hold float64 copies of parameters until the next search for cycles of objects."""
    network, x, y = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 3)), torch.randn(6, 8), torch.arange(6) % 3
    with recorded(network) as record:
        F.cross_entropy(network(x), y).backward()
    grads = {name: p.grad for name, p in network.named_parameters()}
    made = []

    class Watched(Recorded):
        def new_replay(self, arithmetic):
            made.append(weakref.ref(replay := super().new_replay(arithmetic)))
            return replay

    step = Watched(record, network, F.cross_entropy, [(x, y)], 0.0, grads, 1.0, {})
    gc.disable()
    try:
        compared_with_the_replay(step, PRECISIONS["bf16"])
        assert [replay() for replay in made] == [None] * len(made) != []
    finally:
        gc.enable()


def test_between_forward_and_backward_a_replay_holds_what_its_layers_saved_and_no_more():
    rows, width, held = 64, 48, []

    def loss_fn(output, y):
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (rows, width)]
        held.append(sum(t.untyped_storage().nbytes() for t in tensors if t.dtype == torch.float64))
        return F.cross_entropy(output, y)

    layers = (nn.Linear(8, width), AddsInPlace(), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    network = nn.Sequential(*layers)
    x, y = torch.randn(rows, 8), torch.arange(rows) % 10
    with recorded(network) as record:
        F.cross_entropy(network(x), y).backward()
    grads = {}

    class Keeps(Arithmetic):
        def compare(self, point, seen, exact, dtype):
            if point.kind == "parameter":
                grads[point.layer] = exact

    Replay(Recorded(record, network, loss_fn, [(x, y)], 0.0, {}, 1.0, {}), Keeps(torch.float64)).run()
    assert [round(bytes_held / (8 * rows * width)) for bytes_held in held] == [2]  # the results of ReLU and of Tanh
    wrong = {name: (grads[name] - p.grad).norm() / p.grad.norm() for name, p in network.named_parameters()}
    assert max(wrong.values()) < 2.0**-20


class Exponential(torch.autograd.Function):
    """A function of the user's own that keeps its result by itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.result = x.exp()
        return ctx.result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.result


class Attends(nn.Module):
    """A layer of the user's own, whose second result is an operand of the first one's backward."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        self.last = (Exponential.apply(x @ self.weight / 4)).softmax(-1)
        return self.last @ x, self.last


class ReadsAgain(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.attends, self.last = nn.Linear(8, width), Attends(width), nn.Linear(width, 10)

    def forward(self, x):
        y, _ = self.attends(self.first(x))
        return self.last(y + self.attends.last.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_result_that_somebody_else_reads_stays(dtype):
    network, compared = ReadsAgain(), []
    x, y = torch.randn(16, 8), torch.arange(16) % 10
    with recorded(network) as record:
        F.cross_entropy(network(x), y).backward()

    class Compares(Arithmetic):
        def compare(self, point, seen, exact, dtype):
            compared.append(float((seen - exact).norm() / exact.norm()))

    grads = {name: p.grad for name, p in network.named_parameters()}
    step = Recorded(record, network, F.cross_entropy, [(x, y)], 0.0, grads, 1.0, {})
    Replay(step, Compares(dtype)).run()
    assert len(compared) > 10
    assert max(each for each in compared if each == each) < 2.0**-18


def test_numbers_that_are_all_rounded_one_way_have_no_factor():
    exact = torch.tensor([0.3, -0.3, 0.3, -0.3], dtype=torch.float64)
    rounded = exact.bfloat16()  # each number is 0.1 % too large
    assert factor_of([rounded], [exact], [1.0]) == 1.0
    assert factor_of([rounded], [exact], [2.0, 1.0]) == 1.0
    assert factor_of([rounded.float()], [exact], [1.0]) == pytest.approx(float(rounded[0]) / 0.3)
    assert factor_of([(1.1 * exact).float()], [exact], [1.0]) == pytest.approx(1.1)
