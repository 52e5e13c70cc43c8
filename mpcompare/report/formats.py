"""The formats of a report's figures, and of its table."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpcompare.errors import InputError

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.figure import Figure

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


def add_out(parser: ArgumentParser, figure: str, default: str) -> None:
    """Adds ``--out [FILE]``, which asks for ``figure`` too; without FILE it goes into the file ``default``."""
    parser.add_argument(
        "--out",
        nargs="?",
        type=Path,
        const=Path(default),
        metavar="FILE",
        help=f"also draw {figure} into FILE (.png, .svg or .pdf; without a FILE: %(const)s)",
    )


def check_figure(file: Path) -> None:
    """Raises InputError unless a figure can be written to ``file``, the value of --out: its suffix is one of
    :data:`FIGURES`, and its folder is there. It is called before any work is done for the figure."""
    if file.suffix.lstrip(".") not in FIGURES:
        accepted = ", ".join(f".{each}" for each in FIGURES)
        raise InputError("--out", file, f"expected a name that ends in one of {accepted}")
    if not file.parent.is_dir():
        raise InputError("--out", file, f"cannot write there (there is no folder {file.parent})")


def save_figure(figure: "Figure", file: Path) -> None:
    """Writes ``figure`` to ``file`` in the format of its suffix, and says so; raises InputError if it cannot."""
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise InputError("--out", file, f"cannot write there ({error.strerror})") from None
    print(f"wrote {file}")
