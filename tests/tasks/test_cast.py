import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from mpcompare.tasks.cast import cast_module
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.text import CharGpt


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_cast_and_layers_that_sum_many_numbers_stay_in_fp32(dtype):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3))
    cast_module(model, dtype)
    assert [p.dtype for layer in (model[0], model[3]) for p in layer.parameters()] == [dtype] * 4
    assert {p.dtype for layer in (model[1], model[4]) for p in layer.parameters()} == {torch.float32}
    assert model[1].running_mean.dtype is torch.float32
    given = []
    model[4].register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))  # after the one that casts
    assert model(torch.ones(2, 1, 4, 4, dtype=dtype)).dtype is dtype
    assert given == [torch.float32]


class Buffered(nn.Module):
    """Every way in which an fp32 buffer may meet a product of 16-bit numbers."""

    def __init__(self, recurrent: type[nn.RNNBase]) -> None:
        super().__init__()
        self.linear, self.recurrent = nn.Linear(8, 8), recurrent(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("positions", torch.rand(5, 8))
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h, _ = self.recurrent(self.linear(x + self.positions) + self.positions)
        h = h + self.positions
        h = self.attention(h, h, h, attn_mask=self.mask, need_weights=False)[0] + self.positions
        shares = (h @ h.mT + self.mask).softmax(dim=-1)
        return torch.einsum("bij,bjc->bic", shares, x)


@pytest.mark.parametrize("recurrent", [nn.GRU, nn.LSTM])
def test_buffers_stay_in_fp32_and_what_they_are_added_to_enters_products_in_16_bits(recurrent):
    model = Buffered(recurrent)
    positions = model.positions.clone()
    cast_module(model, torch.bfloat16)
    output = model(torch.rand(2, 5, 8, dtype=torch.bfloat16))
    assert output.dtype is torch.bfloat16
    assert torch.equal(model.positions, positions)
    assert model.count.dtype is torch.int64
    output.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (nn.LSTM(8, 8), lambda layer, x: layer(x[None], (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)))[0]),
        (nn.GRU(8, 8), lambda layer, x: layer(x[None], hx=torch.zeros(1, 2, 8))[0]),
        (nn.LSTMCell(8, 8), lambda layer, x: layer(x, (torch.zeros(2, 8), torch.zeros(2, 8)))[0]),
        (nn.LayerNorm(8), lambda layer, x: layer(input=x)),
    ],
)
def test_inputs_in_nests_and_by_name_are_cast_as_others_are(layer, call):
    model = nn.Sequential(nn.Linear(8, 8), layer)
    cast_module(model, torch.bfloat16)
    output = call(layer, model[0](torch.rand(2, 8, dtype=torch.bfloat16)))
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad.dtype is p.dtype for p in layer.parameters())


class NormThatNotes(nn.LayerNorm):
    def forward(self, x, scales, kept):
        scales.append(x.std())
        kept["mean"] = x.mean()
        return super().forward(x)


def test_a_layer_writes_into_the_list_and_the_dict_that_it_is_given():
    norm, scales, kept = NormThatNotes(8), [], {"count": torch.ones(1)}
    cast_module(norm, torch.bfloat16)
    for _ in range(2):
        norm(torch.rand(2, 8, dtype=torch.bfloat16), scales, kept=kept)
    assert len(scales) == 2
    assert set(kept) == {"count", "mean"}


def test_an_error_in_a_cast_module_leaves_no_mode_behind():
    model = Buffered(nn.GRU)
    cast_module(model, torch.bfloat16)
    with pytest.raises(RuntimeError, match="must match"):
        model(torch.rand(2, 3, 8))
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)


def test_a_weight_that_an_embedding_shares_with_a_product_is_cast_and_stays_shared():
    model = CharGpt(11, 6, width=8, heads=2, blocks=1, tied=True)
    cast_module(model, torch.bfloat16)
    assert model.embedding.weight is model.output.weight
    assert model.output.weight.dtype is torch.bfloat16
    assert dict(model.named_parameters())["positions.weight"].dtype is torch.float32  # shared with nothing
    assert model(torch.zeros(2, 6, dtype=torch.int64)).dtype is torch.bfloat16


class OwnHead(nn.Module):
    """Multiplies with the weight of its embedding, and makes a state of its format."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(11, 8), nn.Linear(16, 8)

    def forward(self, ids):
        x = self.embedding(ids)
        state = self.embedding.weight.new_zeros(x.shape)
        return nn.functional.linear(self.mix(torch.cat([x, state], dim=-1)), self.embedding.weight)


def test_the_weight_of_an_embedding_enters_products_of_the_networks_own_in_16_bits():
    model, ids = OwnHead(), torch.arange(6)
    cast_module(model, torch.bfloat16)
    own = dict(model.named_parameters())
    assert own["embedding.weight"].dtype is torch.float32
    copied = copy_of(model)
    for each in (model, copied):
        output = each(ids)
        assert output.dtype is torch.bfloat16
        output.float().sum().backward()
    assert own["embedding.weight"].grad.dtype is torch.float32
    assert own["embedding.weight"].grad[7:].any()  # rows that the head alone takes
    assert torch.equal(own["embedding.weight"].grad, dict(copied.named_parameters())["embedding.weight"].grad)


class Rotary(nn.Module):
    """Turns what it is given by complex numbers."""

    def __init__(self):
        super().__init__()
        self.output = nn.Linear(8, 4)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x):
        turned = torch.view_as_complex(x.float().view(-1, 4, 2)) * self.turns
        return self.output(torch.view_as_real(turned).flatten(1))


def test_what_was_multiplied_with_a_complex_buffer_enters_products_in_16_bits():
    model = Rotary()
    cast_module(model, torch.bfloat16)
    assert model.turns.dtype is torch.complex64
    assert model(torch.rand(3, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_a_weight_that_is_computed_from_others_is_computed_in_fp32():
    model = spectral_norm(weight_norm(nn.Linear(6, 4)))
    computed = model.weight.detach()
    cast_module(model, torch.bfloat16)
    assert {p.dtype for p in model.parametrizations.parameters()} == {torch.float32}
    assert model.bias.dtype is torch.bfloat16
    model.eval()  # its vectors stay as they are
    assert torch.equal(model.weight, computed.bfloat16())
    assert model(torch.ones(2, 6, dtype=torch.bfloat16)).dtype is torch.bfloat16


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", amount=0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("hooked", [nn.utils.spectral_norm, nn.utils.weight_norm, pruned])
def test_a_weight_that_a_hook_computes_is_computed_in_fp32(hooked):
    model = hooked(nn.Linear(6, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    right = copy_of(model)
    cast_module(model, torch.bfloat16)
    assert {p.dtype for name, p in model.named_parameters() if name != "bias"} == {torch.float32}
    assert model.bias.dtype is torch.bfloat16
    x = torch.ones(2, 6, dtype=torch.bfloat16)
    right(x.float())
    assert model(x).dtype is torch.bfloat16
    assert torch.equal(model.weight, right.weight.bfloat16())
    assert all(torch.equal(b, other) for b, other in zip(model.buffers(), right.buffers(), strict=True))


class OwnNorm(nn.Module):
    """A norm that a network brings itself, as nanoGPT does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return nn.functional.layer_norm(x, (8,), self.weight, self.bias), x


class NormedProduct(nn.Module):
    """Multiplies, whatever its name says."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))


def test_a_norm_of_the_networks_own_stays_in_fp32_and_gives_16_bits():
    norm, product = OwnNorm(), NormedProduct()
    cast_module(nn.Sequential(norm, product), torch.bfloat16)
    assert {p.dtype for p in norm.parameters()} == {torch.float32}
    assert [y.dtype for y in norm(torch.rand(2, 8, dtype=torch.bfloat16))] == [torch.bfloat16] * 2
    assert product.weight.dtype is torch.bfloat16


def test_gradients_of_a_norm_of_the_networks_own_are_sums_in_fp32():
    """Torch's ``layer_norm`` on a CPU sums 2048 rows in 16 bits where its weights have these."""
    x, g = torch.randn(2, 2048, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = OwnNorm()
    cast_module(nn.Sequential(norm), torch.bfloat16)
    norm(x)[0].backward(g)
    exact = g.double().sum(dim=0)
    assert (norm.bias.grad - exact).norm() <= 2**-20 * g.double().norm(dim=0).norm() * 2048**0.5
