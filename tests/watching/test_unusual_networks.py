"""Right loops with unusual networks: the loops have no defect, and all layers are examined."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support.marks import diagonal, slow_after
from support.watched_loops import Loop, spoil
from torch import nn
from torch.nn import functional as F

import mpcompare
from mpcompare.verdict.examine.forced.own_products import is_torchs

WIDTH = 16
LOOP = replace(Loop(), updates=2, clip=None, batch=lambda: (torch.randn(32, 4), torch.randint(3, (32,))))


class OwnStatistics(nn.Module):
    """Keeps a mean of squares that autograd does not see."""

    def __init__(self):
        super().__init__()
        self.register_buffer("squares", torch.zeros(WIDTH))

    def forward(self, x):
        seen = x.detach()
        self.squares.mul_(0.9).add_((seen * seen).mean(0) * 0.1)
        return x


class UnitRows(nn.Module):
    """Divides by no less than the last digit of a 16-bit number. The norms of its rows are smaller."""

    def forward(self, x):
        x = 1e-3 * x
        return x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).eps)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH) / 4)

    def forward(self, x):
        scores, chosen = F.linear(x, self.weight).topk(2)
        return scores.softmax(-1, dtype=torch.float32), chosen


class Routed(nn.Module):
    """Each row goes to two of eight experts. In 16 bits some rows have two equal scores."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = Router(), nn.Parameter(torch.randn(8, WIDTH, WIDTH) / 4)

    def forward(self, x):
        share, chosen = self.router(x)
        return (share[..., None] * (self.experts[chosen] @ x[:, None, :, None]).squeeze(-1)).sum(1)


class CastBack(nn.LayerNorm):
    """A norm that returns the format of its input, as in CLIP."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class HalfBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] > 0) / 2


class Rectified(nn.Module):
    def forward(self, x):
        return HalfBackward.apply(x)


class NormAct(nn.LayerNorm):
    """A norm of channels with an activation of its own, as in timm."""

    def __init__(self, activation):
        super().__init__(WIDTH)
        self.activation = activation

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return self.activation(x.permute(0, 3, 1, 2))


class BatchNormAct(nn.BatchNorm2d):
    def __init__(self):
        super().__init__(WIDTH)
        self.activation = nn.SiLU()

    def forward(self, x):
        return self.activation(super().forward(x))


class Layerdrop(nn.Module):
    """Leaves layers out as Python's or numpy's random numbers say."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if (random.random() if number % 2 else np.random.rand()) < 0.5:
                x = x + layer(x)
        return x


class Mixed(nn.Module):
    """Multiplies with a tensor in fp32 that is no buffer, outside of autocast."""

    def __init__(self):
        super().__init__()
        self.mixing = torch.randn(WIDTH, WIDTH) / 4

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.mixing


class Depthwise(nn.Conv2d):
    """Is made in its own way, and computes as torch's convolution does."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)


class Scaled(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, 2 * self.weight, self.bias)


class Doubled(nn.Linear):
    """Multiplies by a tensor that it computes from its parameter."""

    @property
    def weight(self):
        return 2 * self.raw

    @weight.setter
    def weight(self, value):
        self.raw = value


@dataclass
class Found:
    value: torch.Tensor
    largest: torch.Tensor


class Described(nn.Module):
    """Returns an object, and torch does not know what it holds."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Found(x * self.gain, x.amax())


class OfObjects(nn.Module):
    def __init__(self):
        super().__init__()
        self.described = Described()

    def forward(self, x):
        found = self.described(x)
        return found.value / (1 + found.largest.abs())


class Batched(nn.Module):
    """Multiplies by several weights at once (``torch.vmap``)."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, WIDTH, WIDTH // 2) / 4)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(torch.vmap(lambda weight: x @ weight, out_dims=1)(self.weights).flatten(1))


def images(layer):
    return nn.Sequential(
        nn.Unflatten(1, (WIDTH, 1, 1)), nn.Upsample(8), layer, nn.GELU(), nn.Flatten(), nn.AvgPool1d(64)
    )


class Empty(nn.Linear):
    """Has a parameter without numbers, as an adapter of rank 0 does."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.down, self.up = nn.Parameter(torch.empty(0, WIDTH)), nn.Parameter(torch.empty(WIDTH, 0))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Quantized(nn.Linear):
    """Rounds its weight to steps that are coarser than 16 bits. Autocast casts the rounded weight."""

    def forward(self, x):
        return F.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, 0.01, 0, -128, 127), self.bias)


@pytest.mark.parametrize(
    "make",
    slow_after(4, [
        Empty, OwnStatistics, Routed, OfObjects, Batched, lambda: Quantized(WIDTH, WIDTH), UnitRows, Layerdrop, Mixed,
        lambda: nn.Sequential(CastBack(WIDTH), nn.GELU(), CastBack(WIDTH)),
        lambda: images(Depthwise()),
        lambda: images(Scaled(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)),
        lambda: images(NormAct(nn.ReLU(inplace=True))),
        lambda: nn.Sequential(images(BatchNormAct()), nn.Tanh()),
    ]),
)  # fmt: skip
def test_a_right_loop_has_no_defect(make):
    random.seed(4)
    np.random.seed(4)
    loop = replace(LOOP, make=lambda: nn.Sequential(nn.Linear(4, WIDTH), make(), nn.Linear(WIDTH, 3)), seed=4)
    seen = loop.run(mpcompare.watch)
    assert ([str(each) for each in seen.defects], seen.not_examined) == ([], [])


class HandsOnAtTimes(nn.Module):
    """Hands on its input in each second call: it is a layer in the calls between."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls % 2 else x.square()


class CallsAtTimes(HandsOnAtTimes):
    """Calls a layer in each second call, and computes by itself in the calls between."""

    def __init__(self):
        super().__init__()
        self.gain, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.gain if self.calls % 2 == 0 else x * self.gain


@pytest.mark.parametrize("make", [HandsOnAtTimes, CallsAtTimes])
def test_a_module_may_be_a_layer_in_some_calls_alone(make):
    """The numbers of its calls were other ones in the replay, and the loop was accused."""
    loop = replace(LOOP, updates=1, dtype=torch.float32, accumulate=3)
    loop.make = lambda: nn.Sequential(nn.Linear(4, WIDTH), make(), nn.Linear(WIDTH, 3))
    seen = loop.run(mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert seen.sight.parameters["0.weight"]


@pytest.mark.slow
def test_a_network_that_returns_one_tensor_twice():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x):
            h = self.body(x)
            return self.head(h), h, [h]

    def loss(output, target):
        y, h, (again,) = output
        return F.cross_entropy(y, target) + h.float().square().mean() + (again[1:] - again[:-1]).float().abs().mean()

    seen = replace(LOOP, make=Features, loss=loss).run(mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], [])


@pytest.mark.slow
def test_a_wrong_activation_of_a_norm_is_a_defect():
    def make():
        return nn.Sequential(nn.Linear(4, WIDTH), images(NormAct(Rectified())), nn.Linear(WIDTH, 3))

    seen = replace(LOOP, make=make).run(mpcompare.watch)
    assert [each.place for each in seen.defects] == ["1.1", "1.2.weight"]


def test_a_loss_that_is_written_into_in_16_bits():
    def loss(y, target):
        found = 1 - y.softmax(-1).gather(1, target[:, None]).to(torch.bfloat16)
        found *= 2
        return found.mean()

    seen = replace(LOOP, make=lambda: nn.Linear(4, 3), loss=loss).run(mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], [])


def test_a_subclass_that_computes_as_torch_is_torchs():
    assert is_torchs(Depthwise())
    assert is_torchs(nn.Linear(2, 2))
    assert not is_torchs(Scaled(2, 2, 1))
    assert not is_torchs(Doubled.__new__(Doubled))
    assert not is_torchs(OwnStatistics())


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_an_attention_is_seen_with_dropout_as_without(dropout):
    """A kernel that draws a mask is no measure: its next mask differs."""

    def make():
        attention = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=dropout, batch_first=True)
        return nn.Sequential(
            nn.Linear(4, WIDTH), nn.Unflatten(0, (-1, 4)), attention, nn.Flatten(0, 1), nn.Linear(WIDTH, 3)
        )

    seen = replace(LOOP, make=make).run(mpcompare.watch, steps=1)
    assert seen.verdict == "no defect"
    assert all(
        seen.sight.parameters[f"2.self_attn.{name}"] for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight")
    )


@pytest.mark.slow
def test_comparing_draws_no_number_of_the_loop():
    """A comparison calls the attention again, and its dropout draws a mask."""

    def make():
        return nn.Sequential(nn.Linear(4, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 32), nn.Linear(WIDTH, 3))

    loops = [replace(LOOP, make=make, updates=4) for _ in range(2)]
    loops[0].run()
    loops[1].run(mpcompare.watch, steps=1, every=1)
    assert all(map(torch.equal, *(loop.made["model"].parameters() for loop in loops)))


def test_a_weight_is_seen_that_a_layer_and_the_loss_use():
    """Torch's own embedding makes a part of the weight's gradient, and measures this part alone."""
    loop = replace(LOOP, make=lambda: nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)))
    loop.batch = lambda: (torch.randint(8, (64,)), torch.randint(8, (64,)))
    loop.loss = lambda output, target: F.cross_entropy(F.linear(output, loop.made["model"][0].weight).float(), target)
    seen = loop.run(mpcompare.watch, steps=1)
    assert seen.verdict == "no defect"
    assert seen.sight.parameters["0.weight"]


@pytest.mark.slow
def test_the_bias_of_a_convolution_before_a_norm_is_summed_in_float64():
    """The terms of its gradient cancel. Their sum in fp32, one by one, may be off by more than the loop's sum."""
    loop = replace(
        LOOP,
        make=lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 3)),
    )
    loop.batch = lambda: (3 + torch.randn(64, 1, 28, 28), torch.randint(3, (64,)))
    seen = loop.run(mpcompare.watch, steps=1)
    calls = seen.look.used()[0].record.calls["0"]
    exact = sum(call.gradients[0].double().sum((0, 2, 3)) for call in calls).norm()
    assert seen.replays[0].layers.gradients["0.bias"].norm == pytest.approx(float(exact), rel=1e-9)


class Prompted(nn.Module):
    """A network in which a layer returns its own parameter."""

    def __init__(self):
        super().__init__()
        self.prompt, self.last = Prompt(), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(x + self.prompt())


class Prompt(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, 4))

    def forward(self):
        return self.rows


@pytest.mark.slow
def test_the_hook_on_a_parameter_that_a_layer_returns_is_no_hook_of_the_loop():
    loop = replace(LOOP, make=Prompted)
    seen = loop.run(mpcompare.watch, steps=1)
    assert not any("hooks of the loop" in each for each in seen.not_examined)
    assert seen.sight.parameters["prompt.rows"]
    assert "prompt" not in seen.replays[0].layers.digits  # it computes nothing, and so rounds nothing
    assert not loop.made["model"].prompt.rows._backward_hooks


class Collects(nn.Module):
    """Puts hooks on its layers in its first call. They collect outputs, as in networks of transformers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        collected = []
        if not getattr(self, "_has_hooks", False):
            self._has_hooks = True
            self.first.register_forward_hook(lambda module, given, y: self.into.append(y))
        object.__setattr__(self, "into", collected)
        y = self.second(self.first(x).tanh())
        return y + collected[0].square().mean()


def test_a_network_that_puts_hooks_on_itself_is_seen_from_the_first_call_on():
    torch.manual_seed(0)
    net = Collects()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with mpcompare.watch(net, optimizer, steps=2) as seen:
        for _ in range(2):
            loss = net(torch.randn(16, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    seen.raise_if_wrong()
    assert seen.not_examined == []


class InputsFirst(nn.Module):
    """One module, which is a layer itself. Its weight has its inputs first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4096, 3) / 64)

    def forward(self, x):
        return x @ self.weight


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_sum_over_the_rows_of_a_weight_may_be_as_long_as_they_are_many(seed):
    def batch():
        return torch.randn(8, 4096), torch.randint(3, (8,))

    seen = replace(LOOP, make=InputsFirst, dtype=torch.float32, batch=batch, seed=seed).run(mpcompare.watch)
    assert seen.defects == [], str(seen)


class CastsToHalf(nn.Module):
    """Casts a number of an fp32 loop to 16 bits and back."""

    def __init__(self, half):
        super().__init__()
        self.given, self.last, self.half = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3), half

    def forward(self, x):
        return self.last(F.gelu(self.given(x)).to(self.half).float())


@pytest.mark.slow
def test_many_rows_do_not_hide_a_cast_in_fp32():
    def batch():
        return torch.randn(2**15, 4), torch.randint(3, (2**15,))

    loop = replace(LOOP, make=lambda: CastsToHalf(torch.float16), dtype=torch.float32, batch=batch, updates=1)
    seen = replace(loop, loss=lambda z, y: F.cross_entropy(z, y, reduction="sum")).run(mpcompare.watch)
    assert [(defect.cause, defect.place) for defect in seen.defects] == [("precision", "last")], str(seen)


class NormOfItsOwn(nn.Module):
    """Calls torch's norm, whose kernel on a CPU sums gradients of 16 bits in 16 bits."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight)


@pytest.mark.parametrize("norm", slow_after(1, [NormOfItsOwn, lambda width: nn.LayerNorm(width, bias=False)]))
def test_torchs_kernel_of_a_norm_is_the_measure_in_anybodys_layer(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), norm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 3)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        x, y = torch.randn(4096, 4), torch.randint(3, (4096,))
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
    assert [each for each in seen.defects if each.cause != "no master weights"] == [], str(seen)


class Pools(nn.Module):
    """Adds a function of windows that overlap to its input. On a CPU torch adds up the windows in 16 bits."""

    def __init__(self, function):
        super().__init__()
        self.given, self.mixed, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)
        self.function = function

    def forward(self, x):
        x = self.given(x)
        return self.last(x + self.function(self.mixed(x))).mean((2, 3))


WINDOWS = {
    "folded": lambda x: F.fold(F.unfold(x, 5, padding=2), x.shape[-2:], 5, padding=2) / 25,
    "average less the input": lambda x: F.avg_pool2d(x, 7, 1, 3) - x,
    "pyramid of maxima": lambda x: sum(F.max_pool2d(x, size, 1, size // 2) for size in (5, 9, 13)),
}


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 1.1])
@diagonal(1, name=list(WINDOWS), dtype=[torch.float16, torch.bfloat16])
def test_windows_that_overlap_are_added_up_as_torch_adds_them(name, dtype, factor):
    def make():
        model = Pools(WINDOWS[name])
        spoil(model.given.weight, lambda g: g * factor)
        return model

    def batch():
        return torch.randn(8, 3, 12, 12), torch.randint(3, (8,))

    seen = replace(LOOP, make=make, dtype=dtype, batch=batch).run(mpcompare.watch)
    assert {defect.place for defect in seen.defects} == ({"given.weight"} if factor > 1 else set()), str(seen)


class Alike(nn.Module):
    """Attends to tokens that are all equal, as a window of padding has them. Torch's kernel adds up equal terms."""

    def __init__(self):
        super().__init__()
        self.given, self.last = nn.Linear(4, 3 * WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        q, k, v = self.given(x[:, None].expand(-1, 576, -1))[:, None].chunk(3, -1)
        return self.last(F.scaled_dot_product_attention(q, k, v)[:, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 1.001])
def test_equal_terms_are_summed_in_fp32_as_torch_sums_them(factor):
    def make():
        model = Alike()
        spoil(model.given.weight, lambda g: g * factor)
        return model

    seen = replace(LOOP, make=make, dtype=torch.float32).run(mpcompare.watch)
    assert {defect.place for defect in seen.defects} == ({"given.weight"} if factor > 1 else set())


class NormOfSingleNumbers(nn.Module):
    """Of a number less itself nothing is left but the bias, and what torch's kernel rounds."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, WIDTH), nn.LayerNorm(1), nn.Linear(WIDTH, 3)

    def forward(self, x):
        y = self.first(x)
        return self.last(y + self.norm(y.unsqueeze(-1)).squeeze(-1))


@pytest.mark.slow
def test_a_norm_of_single_numbers_is_as_far_off_as_torchs():
    seen = replace(LOOP, make=NormOfSingleNumbers).run(mpcompare.watch, steps=1)
    place = seen.replays[0].layers.places["output norm"]
    assert (place.norm, place.terms) == (0, 0)
    assert place.error > 0
    assert seen.verdict == "no defect"
