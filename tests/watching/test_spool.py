"""The file that the copies of a watched step lie in."""

import os

import pytest
import torch

from mpcompare.watching.spool import PIECE, Spool


@pytest.mark.slow
def test_the_space_of_copies_that_are_gone_is_used_again():
    spool, large = Spool(), torch.arange(3 * PIECE // 16, dtype=torch.float32)  # in a piece there is room for one
    first = spool.copy(large)
    for number in range(20):
        last = spool.copy(large + number)
    wide = torch.ones(PIECE // 2)
    assert torch.equal(spool.copy(wide), wide)
    assert torch.equal(first, large)
    assert torch.equal(last, large + 19)
    assert os.fstat(spool._file.fileno()).st_size <= 4 * PIECE + wide.nbytes


def test_some_elements_have_the_dtype_of_the_tensor():
    spool = Spool()
    for dtype in (torch.uint8, torch.float16, torch.float32):
        assert spool.some(torch.ones(3, 2, dtype=dtype)).dtype is dtype
    assert spool.some(torch.ones(2), 0.5).tolist() == [0.5, 0.5]
