"""A tenth of the wrong inputs that ``scripts/wrong_inputs.py`` tries. All but every fifth of them are slow."""

from itertools import islice

import pytest
import wrong_table
from wrong_inputs import WORKS, faults_of, folder_of_a_user

TENTH = [
    pytest.param(wrong, id=" ".join(wrong.overrides), marks=[pytest.mark.slow] if turn % 5 else [])
    for turn, wrong in enumerate(islice(wrong_table.every(), 0, None, 10))
]


@pytest.fixture(scope="module")
def folder():
    with folder_of_a_user() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["mpcompare"])  # put back afterwards


@pytest.mark.parametrize("wrong", TENTH)
def test_a_wrong_input_is_one_line_and_leaves_nothing_half_written(wrong, folder):
    assert faults_of(wrong, folder) == []


@pytest.mark.slow
def test_the_command_that_they_change_works(folder, cli, monkeypatch, tmp_path):
    (tmp_path / "wrong.py").write_text((folder / "wrong.py").read_text())
    assert cli(*WORKS).code == 0


def test_there_are_enough_of_them():
    assert len(list(wrong_table.every())) >= 350
