"""Libraries that are missing, or are not made for this Python."""

import re
from pathlib import Path

import pytest

from mpcompare.backends.peers import library as libraries
from mpcompare.backends.peers.library import PYTHON, library
from mpcompare.errors import BackendUnavailable

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_a_missing_one_names_the_extra_that_installs_it():
    with pytest.raises(
        BackendUnavailable, match=re.escape("needs the package of no_such: pip install 'mpcompare[fabric]'")
    ):
        library("no_such", "fabric")


def test_on_a_python_that_is_too_old_no_extra_is_advised(monkeypatch):
    monkeypatch.setattr(libraries.sys, "version_info", (3, 10, 4))
    with pytest.raises(BackendUnavailable, match=r"^backend=keras needs Python 3\.11 or newer, and this is 3\.10$"):
        library("keras", "keras")
    with pytest.raises(BackendUnavailable, match="pip install"):
        library("no_such", "fabric")


def test_the_extras_install_nothing_on_an_older_python():
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    left_out = {backend for backend in extras if all("python_version >= '3.11'" in each for each in extras[backend])}
    assert left_out == set(PYTHON)
