"""Stands for ``python`` in the commands of the documents: sizes are small, or a command is only recorded.

It is run as a program, with the name of the program for which it stands, and its arguments. ``STAND_IN_RECORD`` names a
file to which commands are recorded; with ``STAND_IN_RUNS=1`` they are run as well. Environments exist already where
tests run, so ``python3 -m venv`` and ``pip install`` do nothing.
"""

import json
import os
import sys
from collections.abc import Iterator

# Smaller sizes of each task, for keys that a command does not set itself. Other tasks are small in the documents.
OF_TASK = {
    "mnist_mlp": {"data": "synthetic", "task.samples": 2048, "task.batch_size": 64, "task.model.hidden": "[32]"},
    "char_gpt": {"task.batch_size": 8, "task.model.width": 32, "task.model.blocks": 1},
}
TRAINING = {"train.steps": 3, "train.warmup_steps": 1, "report.formats": "[]"}
ALWAYS = {"measure.budget_s": 0.1, "measure.block_s": 0.01, "inference.budget_s": 0.01, "verdict.noise": 1}


def small(arguments: list[str]) -> Iterator[str]:
    """Yields the overrides that make ``python -m mpcompare ARGUMENTS`` small."""
    given = dict(each.lstrip("+").split("=", 1) for each in arguments if "=" in each)
    ours = {**OF_TASK.get(given.get("task", "mnist_mlp"), {}), **TRAINING}
    if "experiment" in given:  # its steps are what it shows
        ours = {key: value for key, value in ours.items() if not key.startswith("train.")}
    yield from (f"{key}={value}" for key, value in ours.items() if key not in given)
    yield from (f"{key}={value}" for key, value in ALWAYS.items())


def is_verb(arguments: list[str]) -> bool:
    """Returns whether ``python -m mpcompare ARGUMENTS`` begins with a verb that takes no overrides."""
    return arguments[:1] != [] and arguments[0].isidentifier() and arguments[0] != "plan"


def main() -> None:
    program, *arguments = sys.argv[1:]
    if record := os.environ.get("STAND_IN_RECORD"):
        with open(record, "a") as file:  # noqa: PTH123 - pathlib takes longer to import than the rest
            print(json.dumps([program, *arguments]), file=file)
    prepares = arguments[:2] == ["-m", "venv"] or (program == "pip" and arguments[:1] == ["install"])
    if prepares or not os.environ.get("STAND_IN_RUNS"):
        return
    if arguments[:2] == ["-m", "mpcompare"] and not {"--help", "--cfg"} & set(arguments) and not is_verb(arguments[2:]):
        arguments += small(arguments[2:])
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
