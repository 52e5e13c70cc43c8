"""The verbs: ``mpcompare VERB ...``. All else is Hydra's: an override has a ``=``, an option begins with ``-``."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mpcompare.errors import did_you_mean, fail, fails_on_input_errors

PROGRAMS = ("report", "pitfalls", "footprint", "scalers")  # python -m mpcompare.PROGRAM
LISTS = {"backends": "backend", "tasks": "task", "experiments": "experiment"}  # verb: group
VERBS = ("plan", "run", *PROGRAMS, *LISTS, "env")


def as_module() -> None:
    """Lets the script ``mpcompare`` import what ``python -m mpcompare`` can: modules of the working directory.

    Python puts the folder of a script first in ``sys.path``; with ``-m``, the working directory.
    """
    script = Path(sys.argv[0])
    if script.name != "__main__.py" and sys.path[0] == str(script.resolve().parent):  # it is not there with -P
        sys.path[0] = os.getcwd()  # noqa: PTH109 - as Python writes it


def run_verb(words: Sequence[str], version: str) -> bool:
    """Runs the verb that the command line begins with. Returns False if it begins with none, or with ``plan``, which
    is Hydra's with other arguments."""
    match words:
        case ["plan", *rest]:
            from mpcompare.command.racing import plan_arguments

            sys.argv[1:] = plan_arguments(rest)
            return False
        case ["run", *rest]:
            from mpcompare.command.racing import run_files

            sys.exit(0 if run_files(rest) else 1)
        case [verb, *rest] if verb in PROGRAMS:
            sys.argv = [f"mpcompare {verb}", *rest]
            import_module(f"mpcompare.{verb}.__main__").main()
        case [verb, *rest] if verb in LISTS:
            from mpcompare.command.listing import show

            given = _parser(verb, "Lists what can be chosen, one line each.", config_dir=True).parse_args(rest)
            with fails_on_input_errors():
                show(LISTS[verb], given.config_dir)
        case ["env", *rest]:
            _parser("env", "Prints what a report of a fault needs: versions, machine, flags.").parse_args(rest)
            from mpcompare.command.environment import show_environment

            show_environment(version)
        case [word, *_] if word.isidentifier():
            fail(f"{word}: expected KEY=VALUE or one of {', '.join(VERBS)}{did_you_mean(word, VERBS)}; --help has more")
        case _ if "--version" in words:  # Hydra's own is in ``mpcompare env``
            print(f"mpcompare {version}")
        case _:
            return False
    return True


def _parser(verb: str, description: str, config_dir: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"mpcompare {verb}", description=description)
    if config_dir:
        parser.add_argument("--config-dir", type=Path, metavar="DIR", help="also what this folder has")
    return parser
