"""Tensors that are stored are the same in memory and in a file, and many of them are in a file."""

import os

import pytest
import torch

from mpcompare import stored
from mpcompare.stored import Stored
from mpcompare.tasks.optimizers import Adam, Sgd

SHAPES = {"a": (3, 4), "b": (), "c": (0, 2), "d": (5,)}


def tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("large", [0, 100, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_it_gives_back_copies_of_what_it_was_given(monkeypatch, large, dtype):
    monkeypatch.setattr(stored, "LARGE", large)
    kept = Stored()
    for seed in (1, 2):  # a tensor is replaced by the next one of its name
        for name, shape in SHAPES.items():
            kept[name] = tensor(seed, *shape).to(dtype)
    given = {name: tensor(2, *shape).to(dtype) for name, shape in SHAPES.items()}
    kept["a"] = given["a"] = tensor(3, 7, 2).to(dtype).t()  # another shape, and column by column
    assert list(kept) == list(SHAPES)
    for name, should in given.items():
        assert kept[name].is_contiguous()
        assert kept[name].dtype == dtype
        assert torch.equal(kept[name], should)
    given["a"].zero_()
    assert torch.equal(kept["a"], tensor(3, 7, 2).to(dtype).t())
    del kept["b"]
    assert set(kept) == {"a", "c", "d"}
    assert "b" not in kept


def test_what_is_too_much_for_the_memory_lies_in_a_file_whose_places_are_used_again(monkeypatch):
    monkeypatch.setattr(stored, "LARGE", 1000)
    kept = Stored()
    for seed in (1, 2):
        kept.update({name: tensor(seed, 8, 8) for name in "abc"})
    assert [name for name in kept if kept[name] is kept[name]] == ["a"]  # in memory: no new copy each time
    assert os.fstat(kept._file.fileno()).st_size == 2 * 64 * 8


def test_it_stays_in_memory_where_no_file_can_be_written(monkeypatch):
    monkeypatch.setattr(stored, "LARGE", 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    kept = Stored({"w": tensor(1, 10)})
    monkeypatch.setattr(os, "pwrite", full)
    kept["w"] = tensor(2, 10)
    assert torch.equal(kept["w"], tensor(2, 10))


@pytest.mark.parametrize("optimizer", [Sgd(0.1, momentum=0.9), Adam(0.1), Adam(0.1, weight_decay=0.1)])
def test_a_replay_that_remembers_in_a_file_is_the_same_bit_for_bit(monkeypatch, optimizer):
    def updates() -> list[torch.Tensor]:
        replay = optimizer.replay()
        steps = [replay.step("w", tensor(2 * step, 100), tensor(2 * step + 1, 100), 0.1) for step in range(3)]
        kept = [t for pair in replay.kept("w").values() for t in pair]
        return [*(t for step in steps for t in step), *kept]

    in_memory = updates()
    monkeypatch.setattr(stored, "LARGE", 0)
    assert all(torch.equal(a, b) for a, b in zip(in_memory, updates(), strict=True))
