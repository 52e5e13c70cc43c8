"""The lines of pitfalls, computed once for all tests of a process."""

from functools import cache

from mpcompare.pitfalls.pitfall import Line
from mpcompare.pitfalls.registry import PITFALLS


@cache
def lines(name: str) -> tuple[Line, ...]:
    return tuple(PITFALLS[name].lines())


def line(name: str, asked: str) -> Line:
    """Returns the one line of a pitfall that asks ``asked``, or that has it in its words."""
    (chosen,) = [each for each in lines(name) if asked == each.asked] or [e for e in lines(name) if asked in e.asked]
    return chosen


def results(name: str, asked: str) -> tuple[float, float, float]:
    """Returns the results of that line in fp16, bf16 and fp32."""
    values = line(name, asked).results
    return values["fp16"], values["bf16"], values["fp32"]
