"""Texts of figures, shown as they are: a ``$`` in a name is a dollar, and no formula. Powers are characters, too."""

import re
from contextlib import AbstractContextManager

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation

_RAISED = str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹")
_FORMULA = re.compile(r"\$\\mathdefault\{(?P<number>.*?)(?:\^\{(?P<exponent>[^}]*)\})?\}\$")


def power(base: int, exponent: float) -> str:
    """Returns a whole power in characters: 2⁻¹²⁶."""
    return f"{base}{f'{exponent:.0f}'.translate(_RAISED)}"


def as_they_are() -> AbstractContextManager[None]:
    """Lets no text that is made in the block be read as a formula."""
    return rc_context({"text.parse_math": False})


def without_formulas(figure: Figure) -> None:
    """Lets the ticks of logarithmic axes, which matplotlib labels with formulas, be labelled with characters."""
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        for formatter in (axis.get_major_formatter(), axis.get_minor_formatter()):
            if isinstance(formatter, LogFormatterSciNotation):
                formatter.__class__ = _InCharacters


class _InCharacters(LogFormatterSciNotation):
    """The formatter of logarithmic axes, its formulas as characters."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return _FORMULA.sub(_characters, super().__call__(x, pos))


def _characters(formula: re.Match[str]) -> str:
    raised = (formula["exponent"] or "").translate(_RAISED)
    return formula["number"].replace(r"\times", " \N{MULTIPLICATION SIGN} ") + raised
