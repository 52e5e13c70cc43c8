"""Tensors of a mapping lie in memory one at a time."""

import pytest
import torch

from mpcompare.instruments import meter
from mpcompare.verdict.examine.exact_values import Mapped

MB = 1 << 20


@pytest.mark.skipif(meter.rss_bytes() is None, reason="the resident set is not known here")
def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    given = {str(number): torch.full((4 * MB,), float(number), dtype=torch.float64) for number in range(4)}
    torch.save(given, tmp_path / "given.pt")
    del given
    mapped = Mapped(torch.load(tmp_path / "given.pt", mmap=True))
    before, sums = meter.rss_bytes(), {}
    for name, tensor in mapped.items():
        sums[name] = tensor.sum().item()
        assert meter.rss_bytes() - before < 2 * 32 * MB
    assert meter.rss_bytes() - before < 16 * MB
    assert sums == {str(number): 4.0 * MB * number for number in range(4)}
    assert mapped["3"][0] == 3  # the tensor is read again
    assert len(mapped) == 4
