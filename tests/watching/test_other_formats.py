"""A part of a network that is computed in bf16 in a loop in fp16."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mpcompare


class NormInBf16(nn.LayerNorm):
    """Keeps its weights in fp32, and normalizes in bf16."""

    def forward(self, x):
        weight, bias = self.weight.bfloat16(), self.bias.bfloat16()
        return functional.layer_norm(x.to(torch.bfloat16), self.normalized_shape, weight, bias).to(x.dtype)


class Between(nn.Module):
    """Casts the numbers between two layers to a format, and back to the format of a loop in fp16."""

    def __init__(self, dtype):
        super().__init__()
        self.a, self.b, self.dtype = nn.Linear(16, 32), nn.Linear(32, 4), dtype

    def forward(self, x):
        return self.b(self.a(x).relu().to(self.dtype).half())


class Nested(nn.Module):
    """Has an autocast of its own around a layer."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.a, self.b, self.dtype = nn.Linear(16, 32), nn.Linear(32, 4), dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            h = self.a(x)
        return self.b(h.relu())


def watched(make, dtype=torch.float16):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    x, y = torch.randn(64, 16), torch.randint(4, (64,))
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        with torch.autocast("cpu", dtype=dtype):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return seen


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 32), NormInBf16(32), nn.ReLU(), nn.Linear(32, 4)), "the output of 1"),
        (Nested, "the output of a"),
        (lambda: Between(torch.bfloat16), "what arrives at b"),
    ],
    ids=["norm", "nested autocast", "between layers"],
)
def test_a_part_in_bf16_is_named_with_its_format(make, place):
    seen = watched(make)
    assert {defect.cause for defect in seen.defects} == {"precision"}
    first = seen.defects[0].sentence
    assert first.startswith(place)
    assert first.endswith("roundings make in fp16: it is computed in bf16")


def test_casts_to_the_format_of_the_loop_are_its_roundings():
    seen = watched(lambda: Between(torch.float16))
    assert seen.verdict == "no defect"
    assert seen.not_examined == []


def test_torchs_norm_of_numbers_that_were_cast_is_no_measure():
    class WithoutWeights(nn.LayerNorm):
        def forward(self, x):
            return functional.layer_norm(x.bfloat16(), self.normalized_shape).to(x.dtype)

    def make():
        norm = WithoutWeights(32, elementwise_affine=False)
        return nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), nn.Linear(32, 4))

    seen = watched(make)
    assert seen.defects[0].sentence.startswith("the output of 1")


def test_a_layer_in_fp16_is_no_defect_of_a_loop_in_bf16():
    """Autocast on a GPU computes cuDNN's recurrent layers in fp16, whatever its dtype is."""
    seen = watched(lambda: Nested(torch.float16), torch.bfloat16)
    assert (seen.defects, seen.not_examined) == ([], [])
    assert (seen.facts["precision"], seen.facts["layers"]) == ("bf16", {"fp16": ["a"], "bf16": ["b"]})
