"""The footprints as they are shown: a table on a console, and a figure with a bar for each recipe."""

from collections.abc import Mapping

import rich.box
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpcompare.footprint.count import KINDS, Footprint
from mpcompare.footprint.recipes import FootprintRecipe

PIPE = 160  # characters: a file or a pipe has no width, and is not wrapped at 80
# Okabe and Ito's palette, as in the report's figure of memory, and greys for small kinds.
PALETTE = ("#56B4E9", "#0072B2", "0.2", "#009E73", "#CC79A7", "#D55E00", "#E69F00", "#F0E442", "0.55", "0.8")
COLOURS = dict(zip(KINDS, PALETTE, strict=True))


def show(title: str, footprints: Mapping[FootprintRecipe, Footprint | str], kernels: bool) -> None:
    """Prints a column for each recipe, and a row for each kind of bytes; a text in the place of a footprint says why
    there is none. ``kernels``: whether the memory inside of kernels is counted."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE)
    counted = {recipe: f for recipe, f in footprints.items() if isinstance(f, Footprint)}
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("MB")
    for recipe in counted:
        table.add_column(Text(recipe.name), justify="right")
    for kind in KINDS:
        sizes = [f.by_kind.get(kind, 0) for f in counted.values()]
        if any(sizes):
            table.add_row(kind, *(megabytes(size) if size else "-" for size in sizes))
    table.add_section()
    table.add_row("peak", *(megabytes(f.bytes) for f in counted.values()), style="bold")
    table.add_row("in phase", *(f.phase for f in counted.values()))
    console.print(Text(title, style="bold"))
    console.print(table)
    if not kernels:
        console.print(Text("The memory inside of kernels is not counted: --kernels measures it on this CPU."))
    for recipe, why in footprints.items():
        line = f"{recipe.name}: {why if isinstance(why, str) else recipe.meaning}"
        console.print(Text(line, style="red" if isinstance(why, str) else ""), soft_wrap=True)


def megabytes(size: int) -> str:
    """Returns a size in units of 10^6 bytes, to four digits."""
    if 0 < size < 1000:
        return "<0.001"
    return f"{size / 1e6:,.0f}" if size >= 1e9 else f"{size / 1e6:.4g}"


def draw(title: str, footprints: Mapping[FootprintRecipe, Footprint | str]) -> Figure:
    """Draws the footprints that could be counted."""
    counted = {recipe: f for recipe, f in footprints.items() if isinstance(f, Footprint)}
    figure = Figure(figsize=(8, 1.3 + 0.45 * len(counted)), layout="constrained")
    axes = figure.subplots()
    largest = max(f.bytes for f in counted.values())
    for place, footprint in enumerate(counted.values()):
        left = 0.0
        for kind, size in footprint.by_kind.items():
            axes.barh(place, size / 1e6, left=left, height=0.7, color=COLOURS[kind])
            left += size / 1e6
        axes.annotate(
            f"{megabytes(footprint.bytes)} MB", (left, place), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(counted)), [recipe.name for recipe in counted])
    axes.invert_yaxis()
    axes.set_xlim(0, largest / 1e6 * 1.15)  # room for the numbers
    axes.set_xlabel("MB that are live at the fullest moment of a step, the batch included")
    shown = [kind for kind in KINDS if any(kind in f.by_kind for f in counted.values())]
    handles = [axes.barh(0, 0, color=COLOURS[kind], label=kind) for kind in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9, x=0.02, ha="left", parse_math=False)
    return figure
