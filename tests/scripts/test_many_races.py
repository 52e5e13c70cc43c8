"""The script that measures the report of many races."""

import many_races
import pytest


@pytest.mark.parametrize("races", [["10"], ["10", "30", "30"]])
def test_a_line_needs_two_points_which_is_said_before_the_work(monkeypatch, capsys, races):
    monkeypatch.setattr("sys.argv", ["many_races.py", "nowhere", "--races", *races])
    with pytest.raises(SystemExit):
        many_races.main()
    assert "--races: expected two different numbers at the end" in capsys.readouterr().err
