"""A tenth of the kills of scripts/sweep_kills.py."""

import pytest
import sweep_kills


@pytest.mark.slow
def test_a_sweep_that_is_killed_at_any_moment_ends_with_the_complete_table(capsys):
    sweep_kills.main(["--kills", "2", "--seed", "1"])
    assert capsys.readouterr().out.count("complete after a kill of") == 2
