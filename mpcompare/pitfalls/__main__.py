"""``python -m mpcompare.pitfalls [NAME ...]``: computes and prints the pitfalls of 16 bits."""

import argparse

from rich.console import Console

from mpcompare.errors import check_choice, fails_on_input_errors
from mpcompare.pitfalls.console import show, show_names
from mpcompare.pitfalls.registry import PITFALLS
from mpcompare.report.formats import add_out, check_figure, save_figure
from mpcompare.streams import lasting


@lasting()
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
    with fails_on_input_errors():
        for name in args.names:
            check_choice("pitfall", name, PITFALLS)
        if args.out:
            check_figure(args.out)
        chosen = [PITFALLS[name] for name in dict.fromkeys(args.names)] or list(PITFALLS.values())
        (show_names if args.list else show)(Console(), chosen)
        if args.out:
            from mpcompare.pitfalls.figure import formats  # matplotlib takes longer to import than all above to compute

            save_figure(formats(), args.out)


if __name__ == "__main__":
    main()
