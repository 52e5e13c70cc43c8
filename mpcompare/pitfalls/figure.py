"""The figure of the formats' numbers: their ranges, the gaps between them, and the numbers themselves."""

import math

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from mpcompare.pitfalls.grid import count, gap, next_below, positive_numbers, smallest
from mpcompare.report.figures.kit import COLOURS, dashed

NORMAL, SUBNORMAL = COLOURS[0], COLOURS[4]
GRID = (-25, 17)  # powers of two at the ends of the panel that shows the numbers
SHIFTS = {"fp8 e5m2": 3.0, "fp8 e4m3": -3.0}  # points up: labels of lines that lie close together
SOLID = 2**12  # from this count on numbers are drawn as a bar: no screen shows them one by one


DRAWN = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e5m2": torch.float8_e5m2,
    "fp8 e4m3": torch.float8_e4m3fn,
}


def formats() -> Figure:
    """Draws four panels: the range of each format, its relative gaps, its positive numbers around 1, and its numbers
    between 1 and 2."""
    figure = Figure(figsize=(10, 11), layout="constrained")
    drawn = {
        _ranges: ("Range: from the smallest positive number to the largest", "value (log scale)"),
        _gaps: (
            "Spacing: constant among normal numbers, and up to the number itself among subnormal ones (dot: the end)",
            "value, at powers of two (log scale)",
        ),
        _numbers: (
            f"Grid: a line for each number from {_power(GRID[0])} to {_power(GRID[1])} (bars: too dense for lines)",
            "value (log scale)",
        ),
        _binade: ("Grid between 1 and 2", "value (log scale); right: how many numbers from 1 to below 2"),
    }
    panels = figure.subplots(4, 1, height_ratios=(2.6, 3.6, 2.6, 2.6))
    for axes, (draw, (title, label)) in zip(panels, drawn.items(), strict=True):
        draw(axes)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(label, fontsize=9)
    return figure


def _ranges(axes: Axes) -> None:
    for place, dtype in enumerate(DRAWN.values()):
        limits = torch.finfo(dtype)
        least, normal, largest = map(math.log2, (smallest(dtype), limits.smallest_normal, limits.max))
        axes.barh(place, normal - least, 0.5, left=least, color=SUBNORMAL)
        axes.barh(place, largest - normal, 0.5, left=normal, color=NORMAL)
        axes.text(least - 2, place, _power(least), ha="right", va="center", fontsize=8)
        axes.text(largest + 2, place, _largest(limits.max), ha="left", va="center", fontsize=8)
    _rows(axes)
    axes.set_xlim(-172, 152)
    axes.legend(
        handles=[Patch(color=SUBNORMAL, label="subnormal"), Patch(color=NORMAL, label="normal")],
        loc="lower right",
        fontsize=8,
    )
    _powers_of_two(axes, 32)


def _gaps(axes: Axes) -> None:
    """Draws the gap above each power of two over that power; up to the next one the ratio falls to half of it."""
    for place, (label, dtype) in enumerate(DRAWN.items()):
        powers = range(round(math.log2(smallest(dtype))), math.floor(math.log2(torch.finfo(dtype).max)) + 1)
        relative = [math.log2(gap(2.0**power, dtype) / 2.0**power) for power in powers]
        style = dashed(place)
        axes.plot(powers, relative, linewidth=2, label=label, **style)
        axes.plot(powers[-1], relative[-1], "o", color=style["color"], markersize=5)
        wide = powers[-1] > GRID[1]  # its label has no room next to its end, and stands above the line
        axes.annotate(
            f"{label}: {_power(relative[-1])} of the number",
            (64 if wide else GRID[1], relative[-1]),
            xytext=(0, 5) if wide else (6, SHIFTS.get(label, 0)),
            textcoords="offset points",
            ha="center" if wide else "left",
            va="bottom" if wide else "center",
            fontsize=8,
        )
    axes.set_xlim(-172, 152)
    _powers_of_two(axes, 32)
    axes.yaxis.set_major_locator(MultipleLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda power, _: _power(power)))
    axes.set_ylabel("gap to the next / number", fontsize=9)
    axes.grid(alpha=0.3)


def _numbers(axes: Axes) -> None:
    for place, dtype in enumerate(DRAWN.values()):
        limits = torch.finfo(dtype)
        low, high = max(smallest(dtype), 2.0 ** GRID[0]), min(limits.max, 2.0 ** GRID[1])
        normal = max(limits.smallest_normal, low)
        if normal > low:
            _ticks(axes, place, dtype, (low, next_below(normal, dtype)), SUBNORMAL)
        _ticks(axes, place, dtype, (normal, high), NORMAL)
        if limits.max < 2.0 ** GRID[1]:
            axes.text(math.log2(limits.max) + 0.3, place, _largest(limits.max), va="center", fontsize=8)
    _rows(axes)
    axes.set_xlim(*GRID)
    _powers_of_two(axes, 2)


def _binade(axes: Axes) -> None:
    for place, dtype in enumerate(DRAWN.values()):
        _ticks(axes, place, dtype, (1.0, 2.0), NORMAL)
        axes.text(1.01, place, f"{count(1.0, 2.0, dtype):,}", va="center", fontsize=8)
    _rows(axes)
    axes.set_xlim(-0.01, 1.08)
    axes.set_xticks([math.log2(1 + eighth / 8) for eighth in range(9)], [f"{1 + eighth / 8:g}" for eighth in range(9)])
    axes.tick_params(axis="x", labelsize=8)


def _ticks(axes: Axes, place: int, dtype: torch.dtype, ends: tuple[float, float], colour: str) -> None:
    low, high = ends
    if count(low, high, dtype) >= SOLID:
        left, right = math.log2(low), math.log2(high)
        axes.barh(place, right - left, 0.6, left=left, color=colour)
    else:
        positions = positive_numbers(low, high, dtype).log2().numpy()
        axes.vlines(positions, place - 0.3, place + 0.3, color=colour, linewidth=0.5, snap=False)


def _rows(axes: Axes) -> None:
    axes.set_yticks(range(len(DRAWN)), list(DRAWN), fontsize=9)
    axes.set_ylim(len(DRAWN) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _powers_of_two(axes: Axes, every: int) -> None:
    axes.xaxis.set_major_locator(MultipleLocator(every))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda power, _: _power(power)))
    axes.tick_params(axis="both", labelsize=8)


def _power(exponent: float) -> str:
    return f"$2^{{{exponent:.0f}}}$"


def _largest(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value:.2e}"
