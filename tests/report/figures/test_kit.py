"""The kit of all figures."""

import matplotlib.image
import pytest
from support.marks import slow_rows
from support.records import write_run

from mpcompare.report.report import report


@pytest.mark.usefixtures("undrawn")  # the page draws no figures
@pytest.mark.parametrize(("n", "shape"), [(1, (1, 1)), *slow_rows([(4, (2, 2)), (7, (3, 3))])])
def test_figures_are_at_most_three_comparisons_wide(tmp_path, n, shape):
    for i in range(n):
        write_run(tmp_path / f"{i}-amp", "amp", sweep="s", batch_size=8 * (i + 1))
    assert report([tmp_path], tmp_path / "report", "amp")
    for name in ("loss", "step_time", "phases", "memory"):
        height, width = matplotlib.image.imread(tmp_path / "report" / f"{name}.png").shape[:2]
        assert round(width / (6.4 * 150)) == shape[1]
    assert height / shape[0] < 600
