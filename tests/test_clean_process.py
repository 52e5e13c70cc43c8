"""A clean process: it does what it is asked, and says it where it cannot."""

import os
import signal
from functools import partial

import pytest
import torch

from mpcompare.clean_process import CleanProcess, CleanProcessError
from mpcompare.shared import ALONE, Shared


def made(base, more):
    return base + more, f"{base} and {more}"


def add(thing, more):
    return {"sum": thing + more, "there": os.getpid()}


def raises(thing):
    raise ZeroDivisionError("a bug\nin two lines")


def dies(thing):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def clean():
    process = CleanProcess(partial(made, torch.ones(2)))
    yield process
    process.close()


def test_it_computes_elsewhere_and_what_is_changed_here_changes_nothing_there(clean, tmp_path, monkeypatch):
    answer = clean.make(torch.ones(2))
    assert "tensor([1., 1.])" in answer
    monkeypatch.setattr(torch.Tensor, "__add__", lambda *_: 0)
    value = Shared(tmp_path).once_written("sum", lambda file: clean.save(file, add, (3,)))
    assert value["sum"].tolist() == [5, 5]
    assert value["there"] != os.getpid()
    again = Shared(tmp_path).once_written("sum", lambda file: pytest.fail("it is there"))
    assert again["there"] == value["there"]
    assert ALONE.once_written("sum", lambda file: clean.save(file, add, (4,)))["sum"].tolist() == [6, 6]


def drawn():
    return os.urandom(8), os.urandom(8)


def whole(thing):
    return list(thing)


def test_the_first_function_gets_the_thing_and_one_that_is_another_each_time_is_refused(tmp_path):
    process = CleanProcess(drawn)
    process.make()
    process.save(tmp_path / "v.pt", whole)
    assert len(torch.load(tmp_path / "v.pt")) == 8
    with pytest.raises(CleanProcessError, match="it made another thing from the same arguments"):
        process.save(tmp_path / "v.pt", raises)
    process.close()


def test_it_says_why_it_cannot_and_goes_on(clean, tmp_path):
    clean.make(0)
    with pytest.raises(CleanProcessError, match="ZeroDivisionError: a bug in two lines"):
        clean.save(tmp_path / "v.pt", raises)
    with pytest.raises(CleanProcessError, match="cannot be told what to do"):
        clean.save(tmp_path / "v.pt", lambda thing: thing)
    clean.save(tmp_path / "v.pt", add, (1,))
    with pytest.raises(CleanProcessError, match="its process ended with exit code -9"):
        clean.save(tmp_path / "v.pt", dies)
    with pytest.raises(CleanProcessError, match="its process ended with exit code -9"):
        clean.make(0)
    clean.close()
    clean.close()
