"""The formats in torch."""

import torch

from mpcompare.dtypes import dtype_name, torch_dtype
from mpcompare.precision import FORMATS, TF32


def test_every_format_has_a_dtype_of_its_size_that_is_named_after_it():
    for format in FORMATS.values():
        assert torch_dtype(format).itemsize == format.bytes
        assert dtype_name(torch_dtype(format)) == ("fp32" if format is TF32 else format.name)
    assert dtype_name(torch.float64) == "float64"
    assert dtype_name(torch.int64) == "int64"
