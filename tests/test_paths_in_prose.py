"""Every path that a comment, a docstring or a page names is there."""

import ast
import fnmatch
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

from mpcompare.paths import CONF

ROOT = CONF.parent
PLACEHOLDERS = {"NAME", "X", "DIR", "mine", "my_package", "my_net", "my_networks", "my_backend"}
WRITTEN = {"summary.md", "array.sh"}  # files that a command writes
# Paths from the top of the repository, of folders too; of docs files only, where people keep results of their own.
TOP = re.compile(
    r"(?<![\w./-])(?:(?:mpcompare|scripts|tests|conf|csrc|hydra_plugins)/[\w*./-]*[\w*]|docs/[\w/-]+\.\w+)"
)
# Source files by the end of their path: memory.py, emulator/memory.hpp.
FILE = re.compile(r"(?<![\w./*-])(?:\w+/)*\w+\.(?:py|cpp|cu|hpp|sh|yaml|md)\b")


def files():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("needs the repository")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def python_prose(text):
    """Yields the comments and the docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""


def prose(name, text):
    """Returns what people read of a file: a page as it is, comments and docstrings of code."""
    kind = Path(name).suffix
    if kind == ".py":
        return "\n".join(python_prose(text))
    if kind in (".cpp", ".cu", ".hpp", ".h"):
        return "\n".join(re.findall(r"//.*|/\*(?s:.)*?\*/", text))
    if kind in (".sh", ".yaml", ".toml"):
        return "\n".join(re.findall(r"#.*", text))
    return text if kind == ".md" else ""


def missing(texts, names):
    """Yields the paths in ``texts`` that are none of ``names``, no folder of them and no end of one."""
    paths = {str(path) for name in names for path in (Path(name), *Path(name).parents)}
    ends = {"/".join(parts[first:]) for parts in (name.split("/") for name in names) for first in range(len(parts))}
    for source, text in texts.items():
        for pattern, there in ((TOP, paths), (FILE, ends)):
            for path in pattern.findall(text):
                known = path in there or ("*" in path and fnmatch.filter(there, path))
                known = known or path.rpartition("/")[2] in WRITTEN
                if not known and not set(re.split(r"\W", path)) & PLACEHOLDERS:
                    yield f"{source}: {path}"


def test_every_path_in_prose_is_there():
    names = files()
    texts = {name: (ROOT / name).read_text() for name in names if not name.endswith((".png", ".gz"))}
    suspects = {found.partition(": ")[0] for found in missing(texts, names)}  # few, for prose takes seconds to find
    assert list(missing({name: prose(name, texts[name]) for name in suspects}, names)) == []


def test_a_path_that_is_not_there_is_found():
    names = ["mpcompare/race/turns.py", "README.md"]
    there = "README.md, mpcompare/race, turns.py, race/turns.py, conf/backend/NAME.yaml, my/conf/task/mine.yaml"
    assert list(missing({"a.py": there}, names)) == []
    gone = "mpcompare/race/gone.py, gone.py, measure/turns.py, tests/gone*"
    found = {"mpcompare/race/gone.py", "gone.py", "measure/turns.py", "tests/gone*"}
    assert set(missing({"a.py": gone}, names)) == {f"a.py: {path}" for path in found}
