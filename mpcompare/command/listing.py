"""The options of a group, one line each. The line is what the option's file says of itself.

The line is the comment at the top of a YAML file, or the docstring of the class that the file names. The class is read,
and not imported: a list takes no torch, and runs no code of a package.
"""

import ast
import re
import shutil
import sys
import textwrap
from importlib import resources
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from mpcompare.command import entry_points
from mpcompare.errors import InputError
from mpcompare.foreign import spec_of
from mpcompare.paths import CONF

LONGEST = 100  # characters of a line beyond its first sentence


def show(group: str, config_dir: Path | None) -> None:
    """Prints the options of a group; on a terminal a line ends where the terminal does. Raises InputError where there
    is no folder ``config_dir``, or the name of a backend is taken."""
    if config_dir is not None and not config_dir.is_dir():
        raise InputError("--config-dir", config_dir, "there is no such folder")
    entry_points.register()
    lines = lines_of(group, ([config_dir] if config_dir else []) + search_path())
    name_width = max(map(len, lines), default=0)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name in sorted(lines, key=lambda name: (name.count("/"), name)):
        room = max(width - name_width - 2, 20)
        line = lines[name]
        print(f"{name:{name_width}}  {textwrap.shorten(line, room, placeholder=' ...') if len(line) > room else line}")


def search_path() -> list[Path]:
    """Returns the folders in which Hydra looks for options: conf/ and the folders that search path plug-ins add."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        sources = [each for each in GlobalHydra.instance().config_loader().get_sources() if each.available()]
    packages = [each.path.replace("/", ".") for each in sources if each.scheme() == "pkg"]
    folders = [Path(each.path) for each in sources if each.scheme() == "file"]
    return folders + [Path(str(resources.files(name))) for name in packages]


def lines_of(group: str, folders: list[Path]) -> dict[str, str]:
    """Returns the line of each option of a group. Where two options share a name, Hydra takes the first."""
    lines: dict[str, str] = {}
    for folder in folders:
        for path in sorted((folder / group).rglob("*.yaml")):
            text = path.read_text(errors="replace")
            target = re.search(r"^_target_:\s*([\w.]+)", text, re.MULTILINE)
            name = path.relative_to(folder / group).with_suffix("").as_posix()
            lines.setdefault(name, comment_of(text) or (docstring_of(target[1]) if target else ""))
    store = ConfigStore.instance()
    for file in store.list(group) if group in store.repo else ():
        name = file.removesuffix(".yaml")
        said = docstring_of(str(store.load(f"{group}/{file}").node.get("_target_", "")))
        package = entry_points.origin(name).removeprefix(" of ") if group == "backend" else ""
        lines.setdefault(name, f"{said} ({package})".strip() if package else said)
    return lines


def comment_of(text: str) -> str:
    """Returns the first sentences of the comment at the top of a YAML file; not its directives and its command."""
    said: list[str] = []
    for line in text.splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or (said and not words):
            break
        if words and not words.startswith(("@package", "python -m mpcompare")):
            said.append(words)
    return _first(" ".join(said))


def docstring_of(target: str) -> str:
    """Returns the first sentences of a class's docstring; an empty string where its source is not found."""
    module, _, name = target.rpartition(".")
    source = spec.origin if module and (spec := spec_of(module)) else None
    if source is None or not source.endswith(".py"):
        return ""
    try:
        body = ast.parse(Path(source).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    found = next((ast.get_docstring(each) for each in body if getattr(each, "name", "") == name), None)  # type: ignore[arg-type]
    return _first(" ".join((found or "").split("\n\n")[0].split()))


def _first(text: str) -> str:
    """Returns the first sentence, and those after it that fit into ``LONGEST`` characters."""
    first, *others = re.split(r"(?<=\.)\s+", text)
    for sentence in others:
        if len(first) + 1 + len(sentence) > LONGEST:
            break
        first += f" {sentence}"
    return first
