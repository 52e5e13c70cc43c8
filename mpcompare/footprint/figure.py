"""The footprints as a figure: a bar for each recipe, stacked by kind."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from mpcompare.footprint.count import KINDS, Footprint
from mpcompare.footprint.recipes import FootprintRecipe
from mpcompare.footprint.table import megabytes

# Okabe and Ito's palette, as in the report's figure of memory, and greys for small kinds.
PALETTE = ("#56B4E9", "#0072B2", "0.2", "#009E73", "#CC79A7", "#D55E00", "#E69F00", "#F0E442", "0.55", "0.8")
COLOURS = dict(zip(KINDS, PALETTE, strict=True))


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
