"""The cache of torch.compile holds no half of a compilation."""

import os
from pathlib import Path

import pytest

from mpcompare.command.compiled import VARIABLE, compiled
from mpcompare.paths import cache_dir


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)


def files():
    folder = cache_dir() / "compiled"
    return {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}


def write(name, text):
    (folder := Path(os.environ[VARIABLE], "ab")).mkdir(exist_ok=True)
    (folder / name).write_text(text)


def interrupted(within):
    with compiled(within):
        write("half.so", "")
        raise KeyboardInterrupt


def test_what_a_run_compiled_counts_if_it_ended_well(tmp_path):
    with compiled(tmp_path):
        write("whole.so", "library")
    assert VARIABLE not in os.environ
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    with compiled(tmp_path):
        assert files() == {"whole.so": "library"}


def test_what_one_entrant_left_half_done_no_other_takes(tmp_path):
    with compiled(tmp_path) as forget:
        write("half.so", "")
        forget()
        assert files() == {}
        write("whole.so", "library")
    with compiled(tmp_path):
        assert files() == {"whole.so": "library"}


def test_a_file_that_vanishes_while_files_are_listed_is_left_out(tmp_path, monkeypatch):
    real = Path.stat

    def stat(path, **how):
        if path.name == "gone.tmp":
            path.unlink(missing_ok=True)
        return real(path, **how)

    with compiled(tmp_path) as forget:
        write("gone.tmp", "")
        write("half.so", "")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "is_file", lambda path: True)  # it is there when it is listed
            patch.setattr(Path, "stat", stat)
            forget()
        assert not list(Path(os.environ[VARIABLE], "ab").iterdir())


def test_a_file_that_was_cut_off_is_built_anew(tmp_path):
    with compiled(tmp_path):
        write("whole.so", "library")
    (cache_dir() / "compiled" / "ab" / "whole.so").write_text("lib")
    with compiled(tmp_path):
        assert files() == {}
    (cache_dir() / "compiled.json").write_text("[")
    with compiled(tmp_path):
        assert files() == {}


def test_two_sweeps_at_once_have_caches_of_their_own(tmp_path):
    with compiled(tmp_path):
        first = os.environ.pop(VARIABLE)
        with compiled(tmp_path):
            other = Path(os.environ[VARIABLE])
            assert (other.name, other.parent.parent) == ("compiled", tmp_path)
        os.environ[VARIABLE] = first
    assert first == str(cache_dir() / "compiled")
    assert not other.parent.exists()


def test_the_users_own_cache_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/nowhere")
    with compiled(tmp_path):
        assert os.environ[VARIABLE] == "/nowhere"
