"""The data and the oracle that the entrants of a race share, and entrants that cannot share them."""

import logging
import sys
from pathlib import Path

import pytest
import torch

from mpcompare.shared import ALONE, Shared

VALUE = {"x": torch.arange(6.0).reshape(2, 3), "more": [(torch.tensor([1, 2]), 0.5), "why", None]}


class Make:
    """A function that counts its calls."""

    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1
        return VALUE


def same(value):
    (y, half), why, none = value["more"]
    return torch.equal(value["x"], VALUE["x"]) and y.tolist() == [1, 2] and (half, why, none) == (0.5, "why", None)


def test_the_first_computes_and_the_others_map_what_it_wrote(tmp_path):
    make = Make()
    values = [Shared(tmp_path).once("v", make) for _ in range(3)]
    assert make.times == 1
    assert all(map(same, values))
    assert [path.name for path in tmp_path.iterdir()] == ["v.pt"]
    values[0]["x"][0, 0] = 7  # in this process only
    assert same(Shared(tmp_path).once("v", make))
    assert [value["x"][0, 0].item() for value in values] == [7, 0, 0]
    if sys.platform == "linux":
        assert str(tmp_path / "v.pt") in Path("/proc/self/maps").read_text()


def test_one_alone_computes(tmp_path):
    make = Make()
    assert ALONE.once("v", make) is VALUE
    assert ALONE.once("v", make) is VALUE
    assert make.times == 2


@pytest.mark.parametrize("content", [b"", b"no file of torch's", "half"])
def test_a_file_that_is_no_value_is_a_warning_and_is_written_anew(tmp_path, caplog, content):
    Shared(tmp_path).once("v", Make())
    file = tmp_path / "v.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content == "half" else content)
    with caplog.at_level(logging.WARNING):
        assert same(Shared(tmp_path).once("v", Make()))
    assert "this entrant has its own v: it cannot be shared with the others of the race" in caplog.text
    again = Make()
    assert same(Shared(tmp_path).once("v", again))
    assert again.times == 0


def test_what_a_killed_writer_left_is_no_value(tmp_path):
    (tmp_path / ".v-abc.pt").write_bytes(b"half")
    make = Make()
    assert same(Shared(tmp_path).once("v", make))
    assert make.times == 1


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    shared, make = Shared(tmp_path / "gone"), Make()
    with caplog.at_level(logging.WARNING):
        assert same(shared.once("v", make))
        assert same(shared.once("w", make))
    assert make.times == 2
    assert len(caplog.records) == 1


def test_a_full_disk_is_a_warning(tmp_path, caplog, monkeypatch):
    def full(value, file):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with caplog.at_level(logging.WARNING):
        assert Shared(tmp_path).once("v", Make()) is VALUE
    assert "file write failed" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_fault_of_the_maker_is_the_makers(tmp_path):
    def make():
        raise ValueError("no such data")

    with pytest.raises(ValueError, match="no such data"):
        Shared(tmp_path).once("v", make)


def test_a_value_that_is_put_aside_comes_back_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("mpcompare.shared.LARGE", 1000)
    value = {"params": {"w": torch.arange(500.0)}, "scale": 2.0}
    kept = value["params"]["w"].clone()
    read = Shared(tmp_path).aside(value)
    value["params"]["w"].zero_()
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        found = read()
        assert torch.equal(found["params"]["w"], kept)
        assert found["scale"] == 2.0
        found["params"]["w"].zero_()  # the pages of one reader


def test_a_small_value_that_is_put_aside_is_a_copy():
    value = [torch.ones(3)]
    read = ALONE.aside(value)
    value[0].zero_()
    assert torch.equal(read()[0], torch.ones(3))


def test_a_value_is_put_aside_in_memory_where_no_file_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("mpcompare.shared.LARGE", 1)
    value = torch.ones(30)
    read = Shared(tmp_path / "none").aside(value)
    value.zero_()
    assert torch.equal(read(), torch.ones(30))
