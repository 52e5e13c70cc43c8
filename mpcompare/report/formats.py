"""The formats of a report's figures, and of its table."""

from collections.abc import Sequence

from mpcompare.errors import InputError

FIGURES = ("png", "svg", "pdf")
TEX = "tex"  # the format of the table alone
FORMATS = (*FIGURES, TEX)
DEFAULT = ("png",)


def check_formats(formats: object) -> None:
    """Raises InputError unless ``formats`` is a list of :data:`FORMATS`."""
    listed = formats if isinstance(formats, Sequence) and not isinstance(formats, str) else None
    if listed is None or any(each not in FORMATS for each in listed):
        value = formats if listed is None else next(each for each in listed if each not in FORMATS)
        accepted = ", ".join(FORMATS)
        raise InputError("report.formats", value, f"expected a list of {accepted}, such as [png,svg], or []")
