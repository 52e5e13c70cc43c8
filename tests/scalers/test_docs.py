"""The page on scalers shows what a run prints, and the policies as they are."""

import io
import re

import pytest
from rich.console import Console
from support.scalers import by_policy

from mpcompare.paths import CONF
from mpcompare.scalers.overflows import of_pattern, of_thresholds, power
from mpcompare.scalers.policies import good_steps_to_grow
from mpcompare.scalers.registry import LIBRARIES
from mpcompare.scalers.table import show

DOCS = CONF.parent / "docs"
PAGE = (DOCS / "scalers.md").read_text()
BLOCKS = [block.strip("\n") for block in PAGE.split("```")[1::2] if block.startswith("\n")]  # without a language
OWN_CODE = re.split(r",\s", BLOCKS[0].partition("own code: ")[2])


def printed(steps, interval):
    """Returns what the command prints where all libraries are installed in the versions that the page names."""
    traces = [
        by_policy(name, steps, said=said, growth_interval=interval)
        for name, said in zip(LIBRARIES, OWN_CODE, strict=True)
    ]
    output = io.StringIO()
    show(Console(file=output, width=80), traces, steps)
    return [line.rstrip() for line in output.getvalue().strip().splitlines()]


def test_the_page_shows_the_output_of_a_run():
    assert BLOCKS[0].splitlines() == printed(of_pattern("..x....xx.."), 4)


def test_the_page_shows_the_summary_of_the_thresholds():
    shown = BLOCKS[1].splitlines()
    assert shown == printed(of_thresholds(DOCS / "scalers" / "thresholds.txt"), 50)[-len(shown) :]


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_page_has_the_defaults_of_each_policy(name):
    policy = LIBRARIES[name].policy
    (row,) = re.findall(rf"^\| \[{name}\].*$", PAGE, re.MULTILINE | re.IGNORECASE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == [power(policy.init_scale), str(policy.growth_interval)]
    assert cells[3].split(",")[0] == str(good_steps_to_grow(policy))
    assert cells[4].startswith("each overflow" if policy.hysteresis == 1 else "the second overflow")
    smallest = "0" if policy.min_scale == 0 else "1" if policy.min_scale == 1 else power(policy.min_scale)
    assert cells[5].split(",")[0] == smallest
