"""``python -m mpcompare.scalers PATTERN``: lets the loss scales of several libraries take the same overflows."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console

from mpcompare.errors import InputError, check_choice, check_number, check_whole, fails_on_input_errors, shortened
from mpcompare.interrupt import ends_when_interrupted
from mpcompare.report.formats import add_out, check_figure, save_figure
from mpcompare.scalers import overflows
from mpcompare.scalers.overflows import SHOWN, OverflowStep, power
from mpcompare.streams import lasting

TOO_LARGE = 2.0**128 - 2.0**103  # the smallest number that fp32 rounds to inf
WIDEST = 110  # characters: on a wider console a row's numbers would lie far from each other


@lasting()
@ends_when_interrupted()
@fails_on_input_errors()
def main() -> None:
    args = _parser().parse_args()
    names = _checked(args)
    steps, title = _steps(args)
    _compare(names, steps, title, args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpcompare.scalers",
        description="Lets the loss scales of torch, Keras, jmp, flax, DeepSpeed and Megatron take the same overflows, "
        "without training. Each is the library's own code where it is installed, and else a class that was tested "
        "to equal it.",
    )
    add = parser.add_argument
    add("pattern", nargs="?", metavar="PATTERN", help="..x....xx..: a dot is a finite step, an x overflows")
    add(
        "--thresholds",
        type=Path,
        metavar="FILE",
        help="instead: on each line the largest scale at which a step is finite",
    )
    add("--run", type=Path, metavar="FOLDER", help="instead: the overflows that a run recorded")
    add("--steps", type=int, metavar="N", help="take N steps: repeats them, or leaves out the last")
    add("--only", metavar="NAMES", help="libraries to compare with torch, as keras,flax (default: all)")
    add("--init-scale", type=float, metavar="S", help="of all (default: each library's own; with --run: the run's)")
    add("--interval", type=int, metavar="N", help="growth interval of all (default: each library's own)")
    add_out(parser, "the figure", "scalers.png")
    return parser


def _checked(args: argparse.Namespace) -> list[str]:
    """Returns the names of the libraries, torch first. Raises InputError where an option has an impossible value."""
    from mpcompare.scalers.registry import LIBRARIES  # torch takes seconds to import: --help stays quick

    names = args.only.split(",") if args.only is not None else list(LIBRARIES)
    for name in names:
        check_choice("--only", name, LIBRARIES)
    if args.steps is not None:
        check_whole("--steps", args.steps, at_least=1)
    if args.interval is not None:
        check_whole("--interval", args.interval, at_least=1)
    if args.init_scale is not None:
        check_number("--init-scale", args.init_scale, above=0, below=TOO_LARGE)
        if args.init_scale < 1:
            raise InputError("--init-scale", args.init_scale, "expected at least 1, the min scale of three libraries")
    if args.out:
        check_figure(args.out)
    return list(dict.fromkeys(["torch", *names]))


def _steps(args: argparse.Namespace) -> tuple[list[OverflowStep], str]:
    """Returns the steps to take, and what they are in words."""
    given = [option for option in (args.pattern, args.thresholds, args.run) if option is not None]
    if len(given) != 1:
        raise InputError("PATTERN", args.pattern or "", "expected one of PATTERN, --thresholds and --run")
    if args.thresholds is not None:
        steps, title = overflows.of_thresholds(args.thresholds), f"overflow thresholds in {args.thresholds.name}"
    elif args.run is not None:
        steps, first = overflows.of_run(args.run)
        title = f"overflows of the run {args.run.resolve().name}"
        args.init_scale = args.init_scale or first  # the record says little of other scales
    else:
        steps, title = overflows.of_pattern(args.pattern), shortened(args.pattern, SHOWN)
    if args.steps is not None:
        steps = list(islice(cycle(steps), args.steps))
    if args.init_scale is not None:
        title += f", init scale {power(args.init_scale)}"
    if args.interval is not None:
        title += f", growth interval {args.interval}"
    return steps, title


def _compare(names: Sequence[str], steps: Sequence[OverflowStep], title: str, args: argparse.Namespace) -> None:
    from mpcompare.scalers.registry import LIBRARIES
    from mpcompare.scalers.table import show
    from mpcompare.scalers.trace import trace

    chosen = {"init_scale": args.init_scale, "growth_interval": args.interval}
    changes = {option: value for option, value in chosen.items() if value is not None}
    traces = []
    for name in names:
        try:
            policy = replace(LIBRARIES[name].policy, **changes)
        except InputError:  # what the options say was checked before
            expected = f"{name} cannot begin at its first loss scale, {args.init_scale:g}: give another --init-scale"
            raise InputError("--run", args.run, expected) from None
        traces.append(trace(LIBRARIES[name], policy, steps))
    console = Console()
    show(console if console.width <= WIDEST else Console(width=WIDEST), traces, steps)
    if args.out:
        from mpcompare.scalers.figure import scales

        save_figure(scales(traces, steps, title), args.out)


if __name__ == "__main__":
    main()
