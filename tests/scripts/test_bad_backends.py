"""A tenth of the bad backends of ``scripts/bad_backends.py``."""

import bad_backends
import pytest


@pytest.mark.slow
def test_a_bad_backend_costs_the_others_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bad_backends.py", "--every", "10"])
    with pytest.raises(SystemExit) as end:
        bad_backends.main()
    assert end.value.code == 0, capsys.readouterr().out


def test_there_are_enough_of_them_and_each_has_its_options():
    names = bad_backends.every()
    assert len(set(names)) == len(names) >= 60
    assert len({tuple(bad_backends.options_of(name).items()) for name in names}) == len(names)
