"""The limits of the formats, against torch's own and against the papers."""

import subprocess
import sys

import pytest
import torch

from mpcompare.dtypes import torch_dtype
from mpcompare.precision import BF16, FORMATS, FP16, FP32, PRECISIONS, TF32, meant_precision, preferred


@pytest.mark.parametrize("format", [FP32, FP16, BF16])
def test_the_limits_are_those_that_torch_has(format):
    limits = torch.finfo(torch_dtype(format))
    assert format.unit_roundoff == limits.eps / 2
    assert format.smallest_normal == limits.smallest_normal
    assert format.smallest_subnormal == limits.smallest_normal * limits.eps
    assert format.maximum == limits.max
    assert 8 * format.bytes == limits.bits == 1 + format.exponent_bits + format.mantissa_bits


def test_tf32_has_the_range_of_fp32_and_the_digits_of_fp16():
    assert (TF32.smallest_normal, TF32.bytes) == (FP32.smallest_normal, FP32.bytes)
    assert TF32.unit_roundoff == FP16.unit_roundoff == 2.0**-11
    assert TF32.maximum == 2.0**128 - 2.0**117


def test_both_tables_are_complete_and_under_the_names_of_what_they_hold():
    assert list(PRECISIONS) == list(FORMATS) == ["fp32", "tf32", "fp16", "bf16"]
    for table in (PRECISIONS, FORMATS):
        assert all(name == each.name for name, each in table.items())


def test_a_precision_rounds_as_its_operands_do_and_has_the_range_of_its_storage():
    fp32, tf32, fp16, bf16 = PRECISIONS.values()
    roundoffs = {name: precision.unit_roundoff for name, precision in PRECISIONS.items()}
    assert roundoffs == {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
    assert [precision.storage for precision in PRECISIONS.values()] == [FP32, FP32, FP16, BF16]
    assert fp16.storage.maximum == 65504.0
    assert fp16.storage.smallest_normal == 2.0**-14
    for wide in (fp32, tf32, bf16):
        assert wide.storage.smallest_normal == 2.0**-126
        assert wide.storage.maximum > 2.0**127
    assert [precision.is_16_bit for precision in PRECISIONS.values()] == [False, False, True, True]
    assert [precision.uses_tf32 for precision in PRECISIONS.values()] == [False, True, False, False]


def test_auto_stands_for_fp16_on_cuda_and_for_bf16_elsewhere():
    assert preferred("cuda") is PRECISIONS["fp16"]
    assert preferred("cpu") is PRECISIONS["bf16"]


def test_the_precisions_can_be_had_without_torch():
    program = "import sys, mpcompare.precision; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(("word", "meant"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")])
def test_the_names_of_dtypes_are_near_those_of_precisions(word, meant):
    assert meant_precision(word, PRECISIONS) == f" (did you mean {meant}?)"
