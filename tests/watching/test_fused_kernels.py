"""Loops with operators that compute or draw on a GPU in another way than on a CPU."""

import warnings
from dataclasses import replace

import pytest
import torch
from support import fused_kernels
from support.marks import CUDA, diagonal, slow_after
from support.watched_loops import Loop, spoil
from torch import nn
from torch.nn import functional as F

import mpcompare

HALVES = [torch.bfloat16, torch.float16]
FORMATS = [*HALVES, torch.float32]
SHORT = replace(Loop(), updates=2)


class Attends(nn.Module):
    def __init__(self, p=0.2, causal=False, of_operands=False):
        super().__init__()
        self.embedding, self.project, self.out = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 10)
        self.p, self.causal, self.of_operands = p, causal, of_operands

    def forward(self, tokens):
        q, k, v = self.project(self.embedding(tokens)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = fused_kernels.attention(q, k, v, self.p if self.training else 0.0, self.causal, self.of_operands)
        return self.out(attended.transpose(1, 2).flatten(2)).mean(1)


class Recurs(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.embedding, self.rnn, self.out = nn.Embedding(32, 16), nn.LSTM(16, 16, 2, dropout=p), nn.Linear(16, 10)

    def forward(self, tokens):
        return self.out(self.rnn(self.embedding(tokens.T))[0].mean(0))


class DropsByItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(32, 16), nn.Linear(16, 10)

    def forward(self, tokens):
        h = self.embedding(tokens).mean(1)
        return self.out(h + fused_kernels.recurrent(h.detach(), 0.1, self.training, h.detach()))


def long_tokens(rows=16):
    return torch.randint(32, (rows, 24)), torch.randint(10, (rows,))


def dropping(inplace):
    drop = nn.Dropout(0.1, inplace=inplace)
    return nn.Sequential(nn.Embedding(32, 16), nn.Flatten(), nn.Linear(64, 32), nn.GELU(), drop, nn.Linear(32, 10))


def is_right(seen):
    assert (seen.defects, seen.not_examined, seen.verdict) == ([], [], "no defect")


@diagonal(1, dtype=FORMATS, inplace=[False, True])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_dropout_draws_by_the_operator_of_the_step(device, inplace, dtype, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(F, "dropout", fused_kernels.dropout)
    is_right(replace(SHORT, make=lambda: dropping(inplace), device=device, dtype=dtype).run(mpcompare.watch))


@pytest.mark.slow
@diagonal(1, dtype=FORMATS, causal=[False, True])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_dropout_within_a_fused_attention_is_drawn_again(device, causal, dtype):
    loop = replace(SHORT, make=lambda: Attends(causal=causal), batch=long_tokens, device=device, dtype=dtype)
    is_right(loop.run(mpcompare.watch))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_a_wrong_gradient_below_a_fused_attention_is_found(dtype):
    def make():
        model = Attends()
        spoil(model.project.weight, lambda g: g * 1.1)
        return model

    seen = replace(SHORT, make=make, batch=long_tokens, dtype=dtype).run(mpcompare.watch)
    assert {str(defect.place) for defect in seen.defects} == {"project.weight"}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_kernel_that_draws_in_another_way_is_not_examined(dtype):
    loop = replace(SHORT, make=lambda: Attends(of_operands=True), batch=long_tokens, dtype=dtype)
    seen = loop.run(mpcompare.watch)
    assert seen.defects == []
    assert len(seen.not_examined) == 1
    assert "the dropout within mpcompare_tests::scaled_dot_product_fused cannot be drawn again" in seen.not_examined[0]


def test_a_layer_that_draws_from_a_state_of_its_own_is_not_examined():
    seen = replace(SHORT, make=DropsByItself).run(mpcompare.watch)
    assert seen.defects == []
    assert len(seen.not_examined) == 1
    assert "the dropout within mpcompare_tests::recurrent has random numbers of its own" in seen.not_examined[0]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("device", [CUDA])
def test_the_dropout_of_cudnn_is_not_examined(device, dtype):
    loop = replace(SHORT, make=lambda: Recurs(0.2), device=device, dtype=dtype)
    weights = []
    for watch in (None, None, mpcompare.watch):
        seen = loop.run(watch)
        weights.append(loop.weights())
    pairs = [all(torch.equal(a, b) for a, b in zip(weights[0], each, strict=True)) for each in weights[1:]]
    assert pairs in ([True, True], [False, False])  # cuDNN may add up in any order
    assert seen.defects == []
    assert len(seen.not_examined) == 1
    assert "the dropout within aten::_cudnn_rnn has random numbers of its own" in seen.not_examined[0]


def takes_cudnns_place(monkeypatch):
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", fused_kernels.flatten_parameters)
    monkeypatch.setattr(torch._VF, "lstm", fused_kernels.lstm)


@pytest.mark.parametrize("dtype", slow_after(1, FORMATS))
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_recurrent_layer_is_examined_and_warns_nobody(device, dtype, monkeypatch):
    if device == "cpu":
        takes_cudnns_place(monkeypatch)
    with warnings.catch_warnings(record=True) as shown:
        seen = replace(SHORT, make=Recurs, device=device, dtype=dtype).run(mpcompare.watch)
    is_right(seen)
    assert [each for each in shown if "contiguous chunk" in str(each.message)] == []
    assert all({**seen.sight.layers, **seen.sight.parameters}.values())
    is_exact = dtype is torch.float32 and device == "cpu"  # cuDNN multiplies in TF32
    assert seen.sight.resolution < (1e-5 if is_exact else 0.05)
    for replay in seen.replays:  # the gradients that torch's own kernel made are near the exact ones
        assert max(e.relative for e in replay.layers.gradients.values()) < 0.02


@pytest.mark.slow
def test_a_layer_of_whose_backward_the_replay_makes_garbage_is_not_seen(monkeypatch):
    takes_cudnns_place(monkeypatch)
    right = fused_kernels.as_it_lies
    monkeypatch.setattr(
        fused_kernels, "as_it_lies", lambda w: fused_kernels.garbage(w) if w.dtype is torch.float64 else right(w)
    )
    seen = replace(SHORT, make=Recurs, dtype=torch.float32).run(mpcompare.watch)
    own = {f"rnn.{name}" for name, _ in Recurs().rnn.named_parameters()}
    assert {name for name, is_seen in seen.sight.parameters.items() if not is_seen} == own
    assert own <= set(seen.sight.blind)
    assert "3 of 3 layers and 3 of 11 parameters are seen" in str(seen)
    assert "not seen: an error of 10 % would not be found in rnn.weight_ih_l0" in str(seen)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_wrong_gradient_of_a_recurrent_layer_is_found(device, monkeypatch):
    if device == "cpu":
        takes_cudnns_place(monkeypatch)

    def make():
        model = Recurs()
        spoil(model.rnn.weight_hh_l1, lambda g: g * 1.1)
        return model

    seen = replace(SHORT, make=make, device=device, dtype=torch.float32).run(mpcompare.watch)
    assert {str(defect.place) for defect in seen.defects} == {"rnn.weight_hh_l1"}


@pytest.mark.parametrize("device", ["cpu", CUDA])
@diagonal(1, dtype=HALVES, seed=range(3))
def test_a_loss_may_round_as_its_operators_did(seed, device, dtype, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", fused_kernels.cross_entropy_loss)
    seen = replace(SHORT, device=device, dtype=dtype, seed=seed, updates=3).run(mpcompare.watch)
    is_right(seen)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert seen.facts["loss"] == f"cross_entropy in fp32, its log_softmax in {name}"
    assert [each.partition(" (")[0] for each in seen.facts["loss_in_16_bits"]] == [seen.facts["loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_wrong_loss_in_16_bits_is_found(device, dtype, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", fused_kernels.cross_entropy_loss)
    plain = torch._C._nn.cross_entropy_loss

    def wrong(x, *others):
        return plain(x, *others) * (1.01 if x.dtype in HALVES else 1.0)

    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", wrong)
    seen = replace(SHORT, device=device, dtype=dtype).run(mpcompare.watch)
    assert "loss" in {defect.cause for defect in seen.defects}


class Projects(nn.Module):
    """A linear layer in somebody's own words, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 48) / 4), nn.Parameter(torch.zeros(48))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:2], 48)


QUERIES, KEYS = slice(0, 16), slice(16, 32)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("of_torch", [True, False])
def test_a_gradient_that_is_0_but_for_the_rounding_of_its_sum_may_be_0(of_torch, device):
    def loop(zeros):
        def make():
            model = Attends(0.0)
            model.project = model.project if of_torch else Projects()
            spoil(model.project.bias, lambda g: g.index_fill(0, torch.arange(48, device=device)[zeros], 0.0))
            return model

        return replace(SHORT, make=make, batch=long_tokens, dtype=torch.float32, device=device, accumulate=1)

    seen = loop(KEYS).run(mpcompare.watch)
    is_right(seen)  # the softmax does not change where the bias moves all scores by one number
    for replay in seen.replays:
        assert replay.layers.gradients["project.bias"].zeros == 16 / 48
        assert replay.layers.rounding["project.bias"].cancelled > 8 / 48
    assert {str(d.place) for d in loop(QUERIES).run(mpcompare.watch).defects} == {"project.bias"}
