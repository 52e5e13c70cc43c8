"""The page on pitfalls shows what a run prints."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from support.pitfalls import lines

from mpcompare.paths import CONF
from mpcompare.pitfalls.__main__ import show
from mpcompare.pitfalls.registry import PITFALLS

SHOWN = CONF.parent / "docs" / "pitfalls" / "output.txt"
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?")


def printed() -> str:
    output = io.StringIO()
    computed = [replace(pitfall, lines=lambda name=name: list(lines(name))) for name, pitfall in PITFALLS.items()]
    show(Console(file=output, width=80), computed)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "")) for each in NUMBER.findall(text)]


def test_the_page_shows_the_output_of_a_run():
    shown = SHOWN.read_text()
    output = printed()
    # Another machine may round the last digit of an exponential or a cosine another way.
    assert NUMBER.sub("#", shown).split() == NUMBER.sub("#", output).split()
    assert numbers(shown) == pytest.approx(numbers(output), rel=1e-3)
