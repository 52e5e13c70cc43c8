"""The fingerprints of the code that a race is for: mpcompare's own, torch's version, and a user's modules."""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpcompare.foreign import version
from mpcompare.paths import CSRC

LENGTH = 12  # digits of a fingerprint


def fingerprints(config: Any) -> dict[str, str]:
    """Returns the version of torch, and a hash of the sources of mpcompare and of each package or module that a
    ``_target_`` of this configuration names. A name that cannot be found is left to the run, whose row says so."""
    names = {target.partition(".")[0] for target in _targets(config)} - {"torch", *sys.stdlib_module_names}
    found = {name: sources for name in sorted(names | {"mpcompare"}) if (sources := list(_sources(name)))}
    return {"torch": version("torch") or "none"} | {name: _hash(sources) for name, sources in found.items()}


def _targets(node: Any) -> Iterator[str]:
    """Yields each ``_target_`` at and below a node."""
    if isinstance(node, dict) and isinstance(target := node.get("_target_"), str):
        yield target
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _targets(each)


def _sources(name: str) -> Iterator[tuple[str, Path]]:
    """Yields the files of a package or module, with their names within it. Nothing is imported."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return
    for folder in map(Path, spec.submodule_search_locations or () if spec else ()):
        yield from ((str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*.py")))
    if spec and spec.has_location and not spec.submodule_search_locations:
        yield name, Path(str(spec.origin))
    if name == "mpcompare":
        yield from ((path.name, path) for path in sorted(CSRC.rglob("*")) if path.is_file())


def _hash(sources: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in sources:
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:LENGTH]
