"""The figure of dtypes: a row a layer. For each run it says what the layer holds, takes, computes and returns."""

import json
import math
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch, Rectangle

from mpcompare.fields import LOSS
from mpcompare.report.comparison import Entry
from mpcompare.report.contents import Report
from mpcompare.report.dtypes import classes, differing, expected_of, layers_of, observed
from mpcompare.report.figures import grouping
from mpcompare.report.figures.kit import ON_DARK, ON_LIGHT, WIDTH, parts_of

SHOWN = ("weight", "input", "computes", "output", "gradient")
# Background and text; every cell says its dtype as well.
STYLES = {"fp32": ("#0072B2", ON_DARK), "bf16": ("#E69F00", ON_LIGHT), "fp16": ("#CC79A7", ON_LIGHT)}
OTHER = ("0.75", "black")
PALE = 0.22  # the opacity of a cell with the baseline's dtype
CELL, ROW, GAP = 0.4, 0.24, 0.5  # inches: width and height of a cell; in cells: between two runs
HEAD = 0.75  # inches above the rows
BESIDE = 4  # runs that stand side by side; more stand below them
MOST = 42  # rows that fit a page
Layers = Sequence[tuple[list[str], str]]  # rows: the names of layers that stand together, and their class


def dtypes(report: Report) -> Figure | None:
    """Draws a table for each comparison in which dtypes were observed; None where none were."""
    comparisons = [comparison for comparison in report.comparisons if observed(comparison)]
    if not comparisons:
        return None
    drawn = [alike(observed(comparison)) for comparison in comparisons]
    rows = [grouped(list(runs.values())) for runs in drawn]
    longest = max(len(_name(names, layer_class)) for each in rows for names, layer_class in each)
    beside = max(min(len(runs), BESIDE) for runs in drawn)
    width = max(0.075 * longest + CELL * beside * (len(SHOWN) + GAP) + 0.4, WIDTH)
    bands = max(math.ceil(len(runs) / BESIDE) for runs in drawn)
    below = 0.9 + 0.15 * any(map(_together, rows))
    height = below + bands * (HEAD + ROW * max(map(len, rows)))
    draw = partial(_part, bands=bands, beside=beside, letters=int(15 * width))
    return parts_of(comparisons, list(zip(drawn, rows, strict=True)), draw, height, width)


def _part(part: SubFigure, drawn: tuple[Mapping[str, Entry], Layers], bands: int, beside: int, letters: int) -> None:
    runs, layers = drawn
    items = list(runs.items())
    for place, axes in enumerate(part.subplots(bands, 1, squeeze=False)[:, 0]):
        _panel(axes, dict(items[BESIDE * place : BESIDE * (place + 1)]), layers, beside)
    handles = [Patch(color=colour, label=name) for name, (colour, _) in STYLES.items()]
    handles.append(Patch(color=OTHER[0], label="another"))
    if any(map(expected_of, runs.values())):
        handles.append(Patch(facecolor=STYLES["fp32"][0], alpha=PALE, label="pale: as in the baseline"))
    part.legend(handles=handles, title=_caption(runs, layers, letters), loc="outside lower left", ncols=5, fontsize=8,
                title_fontsize=8, alignment="left", frameon=False)  # fmt: skip


def _caption(runs: Mapping[str, Entry], rows: Layers, letters: int) -> str:
    """The meaning of the columns, in lines of so many letters."""
    masters: dict[str, list[str]] = {}
    for label, entry in runs.items():
        for dtype in sorted({row["master"] for row in layers_of(entry).values()} - {"-"}):
            masters.setdefault(dtype, []).append(label)
    updated = next(iter(masters)) if len(masters) == 1 else "; ".join(f"{d}: {_few(m)}" for d, m in masters.items())
    together = "\na..b, or a number and a class: layers of one class that do the same in every run"
    text = (
        f"weight: as the layer holds it (what the optimizer updates: {updated or 'not seen'})"
        "    input, output: what it takes and returns\n"
        "computes: operands of its own operators in forward (a block: without its layers' operators)"
        "    gradient: of the loss by the output\n"
        "-: none, or inside of one operator    empty: not seen    two dtypes: several operators, or one that takes both"
    ) + (together if _together(rows) else "")
    return "\n".join(piece for each in text.splitlines() for piece in textwrap.wrap(each, letters))


def _few(labels: Sequence[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _together(rows: Layers) -> bool:
    return any(len(names) > 1 for names, _ in rows)


def alike(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Returns the runs that are drawn, by their headings. Where runs of one backend in one precision do the same, the
    baseline or the first stands for all."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        result = entry.run.result
        key = json.dumps((result.backend, result.precision, layers_of(entry)), sort_keys=True)
        groups.setdefault(key, []).append(entry)
    drawn = {}
    for group in groups.values():
        first = next((entry for entry in group if entry.is_baseline), group[0])
        more = f" + {len(group) - 1} alike" if len(group) > 1 else ""
        drawn[first.label + (" (baseline)" if first.is_baseline else "") + more] = first
    return drawn


def grouped(entries: Sequence[Entry]) -> list[tuple[list[str], str]]:
    """Returns layers and their class. Layers whose names differ in the number of their block alone, and whose dtypes
    differ in no run, stand together. If the rows still do not fit a page, layers whose names differ in any number
    stand together; then all layers of one class."""
    layers = classes(entries)

    def seen(layer: str) -> Hashable:
        return layers[layer], tuple(tuple((layers_of(entry).get(layer) or {}).values()) for entry in entries)

    def block(layer: str) -> Hashable:
        holds_layers = any(other.startswith(f"{layer}.") for other in layers)
        return grouping.without_block_numbers(f"{layer}." if holds_layers else layer), seen(layer)

    def numbers(layer: str) -> Hashable:
        return grouping.without_numbers(layer), seen(layer)

    groups = grouping.groups_of(list(layers), (block, numbers, seen), MOST)
    return [(names, layers[names[0]]) for names in groups]


def _name(layers: Sequence[str], layer_class: str) -> str:
    if layers[0] in ("", LOSS):
        return "loss" if layers[0] else f"the network ({layer_class})"
    name = grouping.span(layers)
    return f"{name} ({layer_class})" if name else f"{len(layers)} {layer_class}"


def _panel(axes: Axes, runs: Mapping[str, Entry], rows: Layers, beside: int) -> None:
    """Draws a band of runs, as wide as one of ``beside`` runs."""
    step = len(SHOWN) + GAP
    for place, (heading, entry) in enumerate(runs.items()):
        left = place * step
        axes.text(left, -HEAD / ROW + 0.2, heading, fontsize=9, weight="bold", va="top")
        for x, role in enumerate(SHOWN):
            axes.text(left + x + 0.4, -0.25, role, fontsize=7, rotation=35, va="bottom")
        for y, (layers, _) in enumerate(rows):
            dtypes = layers_of(entry).get(layers[0])
            if dtypes is None:
                continue
            different = SHOWN if entry.is_baseline or not expected_of(entry) else differing(entry, layers[0])
            for x, role in enumerate(SHOWN):
                _cell(axes, left + x, y, dtypes[role], role in different)
    axes.set_xlim(-0.1, beside * step - GAP + 0.9)
    axes.set_ylim(len(rows), -HEAD / ROW)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [_name(*row) for row in rows], fontsize=8)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _cell(axes: Axes, x: float, y: float, dtype: str, strong: bool) -> None:
    """Draws a rectangle for each of the dtypes, side by side, with their names; pale unless ``strong``."""
    if dtype == "-":
        axes.text(x + 0.5, y + 0.5, "-", fontsize=7, ha="center", va="center", color="0.6")
        return
    parts = dtype.split("+")
    for number, part in enumerate(parts):
        colour, text = STYLES.get(part, OTHER)
        width = 0.94 / len(parts)
        at = x + 0.03 + number * width
        alpha = 1.0 if strong else PALE
        axes.add_patch(Rectangle((at, y + 0.05), width, 0.9, facecolor=colour, alpha=alpha, linewidth=0))
        size = 7 if len(parts) == 1 else 4.5
        middle = (at + width / 2, y + 0.5)
        axes.text(*middle, part, fontsize=size, ha="center", va="center", color=text if strong else "0.35")
