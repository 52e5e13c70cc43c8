"""The README and the pages in docs/ as examples that are run, one page from top to bottom in one empty folder."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

import docs_numbers
from support import stand_in
from sybil import Document, Example, Region
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer

from mpcompare.paths import CONF

ROOT = CONF.parent
PAGES = docs_numbers.pages()
STANDS_FOR = ("python", "python3", ".venv/bin/python", ".venv/bin/pip")
LIMIT_S = 900  # for a block, on a machine that others use


@dataclass
class Followed:
    """The outcome of following a page.

    Attributes:
        commands: the commands of Python programs that its ``sh`` blocks gave, each as a list of words.
        skipped: the reason of each block that is marked to be skipped.
    """

    commands: list[list[str]]
    skipped: list[str]


def parsed(page: Path, evaluate: "Shell | None" = None) -> Document:
    """Returns the page with its blocks of code, and its marks: ``skip`` and ``exits``."""
    shell = CodeBlockParser("sh", evaluate or (lambda example: None))
    return Document.parse(str(page), shell, CodeBlockParser("python", _python), SkipParser(), _exits)


def follow(page: Path, folder: Path, runs: bool) -> Followed:
    """Follows a page in ``folder``: its blocks are run by bash, in small sizes. Without ``runs`` the commands of Python
    programs are recorded and not run.

    Raises:
        AssertionError: a block ended with another exit code than the page says.
    """
    shell, skipped = Shell(folder, runs), []
    for example in parsed(page, shell):
        try:
            example.evaluate()
        except SkipTest as reason:
            skipped.append(str(reason))
    return Followed(shell.commands(), skipped)


class Shell:
    """Runs the ``sh`` blocks of a page in a folder in which the programs that they name are stand-ins."""

    def __init__(self, folder: Path, runs: bool) -> None:
        self.folder, self.record = folder, folder / ".commands"
        for name in STANDS_FOR:
            program = folder / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {stand_in.__file__} {program.name} "$@"\n')
            program.chmod(0o755)
        (folder / ".venv/bin/activate").touch()
        for name in ("scripts", "tests", "docs"):
            (folder / name).symlink_to(ROOT / name)
        path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.environment = {**os.environ, **path, "STAND_IN_RECORD": str(self.record), "STAND_IN_RUNS": "1" * runs}

    def __call__(self, example: Example) -> None:
        bash = ["bash", "-euo", "pipefail", "-c", str(example.parsed)]
        ended = subprocess.run(
            bash, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        expected = example.namespace.pop("exits", 0) if self.environment["STAND_IN_RUNS"] else 0
        where = f"{Path(example.path).name}, line {example.line}"
        assert ended.returncode == expected, f"{where}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}"

    def commands(self) -> list[list[str]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []


def _python(example: Example) -> None:
    exec(compile(str(example.parsed), example.path, "exec"), example.namespace)


def _exits(document: Document) -> Iterable[Region]:
    """Yields the marks ``<!-- exits: 1 -->``: the exit code of the next block."""

    def expect(example: Example) -> None:
        example.namespace["exits"] = example.parsed

    for lexed in DirectiveInHTMLCommentLexer("exits")(document):
        yield Region(lexed.start, lexed.end, int(lexed.lexemes["arguments"]), expect)
