"""The checks in the order of their power to explain: the first that fails is the cause of what fails after it.

Each check is a file of its name: what was found, numbers, derived limits, and the cause if a limit does not hold.
Limits come from the rounding of the precision, from the errors that the reference makes itself, or from the noise that
was measured. None was chosen so that something passes. To add a check, write its file, and its name in ``ORDER``. The
file begins with the question, the value and the limit: ``scripts/docs_numbers.py`` makes docs/checks.md of them. A file
of the same name in examine/ may have a pass of its own for it, ``after_first``, which finds the class of its name here.
"""

from dataclasses import replace
from importlib import import_module
from types import ModuleType

from mpcompare.verdict.judge.check import Case, Checks

# The files. Each has a function ``checks``. Of the reference itself it yields the checks that need no other run.
ORDER = (
    "lent", "promises", "dtypes", "loss_scale", "again", "gradients", "layers", "masks", "buffers", "clip", "idle",
    "counts", "optimizer", "later_steps", "trained_layers", "overflow", "after_a_skip", "sharp", "padding", "resume",
    "aged", "trained", "midway", "trained_buffers", "timed_steps", "moves", "run", "held_out",
)  # fmt: skip
KINDS = {name.replace("_", " "): name for name in ORDER}


def file_of(name: str) -> ModuleType:
    """Returns the file of a check. An examination needs few of them."""
    return import_module(f"{__package__}.{name}")


def all_checks(case: Case) -> Checks:
    """Yields all checks, kind by kind."""
    for kind, name in KINDS.items():
        yield from (replace(check, kind=kind) for check in file_of(name).checks(case))
