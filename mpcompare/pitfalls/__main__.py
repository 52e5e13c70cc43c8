"""``python -m mpcompare.pitfalls [NAME ...]``: computes and prints the pitfalls of 16 bits.

A pitfall has a row for each line, its reason beneath it, and at the end what to do instead.
"""

import argparse
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mpcompare.errors import check_choice, fails_on_input_errors
from mpcompare.interrupt import ends_when_interrupted
from mpcompare.pitfalls.pitfall import COMPARED, Pitfall, number
from mpcompare.pitfalls.registry import PITFALLS
from mpcompare.report.formats import add_out, check_figure, save_figure
from mpcompare.streams import lasting

WIDEST = 110  # characters: on a wider console rows would lie far from their numbers
RESULT = 12  # characters: the longest result, 0.000100017, and a space


@lasting()
@ends_when_interrupted()
@fails_on_input_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mpcompare.pitfalls",
        description="Computes on the CPU of this machine what goes wrong in 16 bits: each line in fp16, bf16 and fp32, "
        "with the reason beneath it.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the pitfalls to compute (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and their questions, and compute nothing")
    add_out(parser, "the figure of the formats' numbers", "pitfalls.png")
    args = parser.parse_args()
    for name in args.names:
        check_choice("pitfall", name, PITFALLS)
    if args.out:
        check_figure(args.out)
    chosen = [PITFALLS[name] for name in dict.fromkeys(args.names)] or list(PITFALLS.values())
    (show_names if args.list else show)(Console(), chosen)
    if args.out:
        from mpcompare.pitfalls.figure import formats  # matplotlib takes longer to import than all above to compute

        save_figure(formats(), args.out)


def show(console: Console, pitfalls: Iterable[Pitfall]) -> None:
    """Computes and prints the pitfalls one after the other."""
    console = console if console.width <= WIDEST else Console(file=console.file, width=WIDEST)
    for pitfall in pitfalls:
        heading = Text(f"{pitfall.name}: {pitfall.question}", style="bold")
        console.print(_row(heading, [format.name for format in COMPARED], "bold"))
        for line in pitfall.lines():
            results = [number(line.results[format.name]) for format in COMPARED]
            console.print(Padding(_row(Text(line.asked), results, ""), (0, 0, 0, 2)))
            console.print(Padding(Text(line.why, style="dim"), (0, 0, 0, 4), expand=False))
        for label, text in (("instead:", pitfall.instead), ("source:", pitfall.source)):
            table = Table.grid(padding=(0, 1))
            table.add_column(no_wrap=True)
            table.add_row(Text(label, style="italic"), Text(text))
            console.print(Padding(table, (0, 0, 0, 2), expand=False))
        console.print()


def show_names(console: Console, pitfalls: Iterable[Pitfall]) -> None:
    """Prints the name and the question of each pitfall, and computes nothing."""
    table = Table.grid(padding=(0, 2))
    for pitfall in pitfalls:
        table.add_row(Text(pitfall.name, style="bold"), Text(pitfall.question))
    console.print(table)


def _row(asked: Text, results: Sequence[str], style: str) -> Table:
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    for _ in results:
        table.add_column(justify="right", width=RESULT, no_wrap=True)
    table.add_row(asked, *(Text(result, style) for result in results))
    return table


if __name__ == "__main__":
    main()
