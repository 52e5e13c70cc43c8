"""A race as a file: everything that a machine needs to run it, and the fingerprints of the code that it needs."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from mpcompare.command.sweep import Job
from mpcompare.errors import InputError
from mpcompare.fields import ConfigAtLeast
from mpcompare.foreign import parsed, read_bytes, spec_of, version
from mpcompare.paths import CSRC
from mpcompare.records import write_atomically
from mpcompare.typed import check_type

FORMAT = 1  # the version of these files
FOLDER = "races"  # a folder in the folder of the sweep, next to the folders of the runs


class AtStart(TypedDict):
    """``record_at_start``."""

    backend: str
    config: ConfigAtLeast


class RaceEntrant(TypedDict):
    """A :class:`Job` without its place."""

    name: str
    record: AtStart
    hydra: dict[str, Any]


class Document(TypedDict):
    """The file."""

    format_version: int
    code: dict[str, str]  # as :func:`fingerprints` returns it
    device: str  # ``cpu``, ``cuda`` or ``auto``; a scheduler reads here whether to ask for a GPU
    entrants: list[RaceEntrant]
    digest: str  # a hash of all other fields: it shows that a file was edited, and is no proof of its origin


def write(race: Sequence[Job]) -> Path:
    """Writes a race into the next free file of its sweep, and returns the path. Raises InputError where the race holds
    a value that JSON does not have, or the file cannot be written."""
    entrants = [{"name": job.name, "record": job.record_at_start, "hydra": job.hydra} for job in race]
    config = race[0].record_at_start["config"]
    document: dict[str, Any] = {"format_version": FORMAT, "code": _code(entrants), "device": config["device"]}
    document["entrants"] = entrants
    try:
        if repr(json.loads(json.dumps(document))) != repr(document):
            raise TypeError("a key is no text")
    except TypeError as error:
        raise InputError("race", race[0].name, f"cannot be written as a file ({error})") from error
    folder = race[0].sweep / FOLDER
    text = json.dumps({**document, "digest": _digest(document)}, indent=1) + "\n"
    try:
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.glob('*.json'))):03d}.json"
        write_atomically(path, lambda unfinished: unfinished.write_text(text), new=True)
    except OSError as error:
        expected = f"cannot write into its {FOLDER} ({error.strerror}); name a folder that can be written"
        raise InputError("hydra.sweep.dir", race[0].sweep, expected) from error
    return path


def read(path: Path) -> list[Job]:
    """Returns the race that a file holds. Its runs lie next to the folder of the file. Raises InputError where the file
    cannot be read, lies elsewhere, is of another version, was edited, or needs other code than there is here."""
    try:
        document = parsed(read_bytes(path))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError("race", path, f"cannot be read ({why}): expected a file that mpcompare plan wrote") from error
    if (folder := path.absolute().parent).name != FOLDER:
        raise InputError("race", path, f"expected it in a folder {FOLDER}: its runs are written into the folder above")
    found = document.get("format_version") if isinstance(document, dict) else None
    if found != FORMAT:
        expected = f"has format_version={found}, expected {FORMAT}: another version of mpcompare has planned it"
        raise InputError("race", path, expected)
    if document.pop("digest", None) != _digest(document):
        raise InputError("race", path, "was edited since it was planned: plan it again with other arguments")
    check_type("race", {**document, "digest": ""}, Document)
    here = _code(document["entrants"])
    for name, planned in document["code"].items():
        if here.get(name) != planned:
            expected = f"was planned with {name} {planned}, and here is {here.get(name, 'none')}: give both the same"
            raise InputError("race", path, expected)
    for entrant in document["entrants"]:
        if (name := PurePosixPath(entrant["name"])).is_absolute() or ".." in name.parts:
            raise InputError("race", path, f"expected a folder below the folder of the sweep, and not {name}")
    sweep = folder.parent
    return [Job(sweep, entrant["name"], entrant["record"], entrant["hydra"]) for entrant in document["entrants"]]


def _code(entrants: Sequence[Any]) -> dict[str, str]:
    return fingerprints([entrant["record"]["config"] for entrant in entrants])


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def fingerprints(config: Any) -> dict[str, str]:
    """Returns the version of torch, and a hash of the sources of mpcompare and of each package or module that a
    ``_target_`` of this configuration names. A name that cannot be found is left to the run, whose row says so."""
    names = {target.partition(".")[0] for target in _targets(config)} - {"torch", *sys.stdlib_module_names}
    found = {name: sources for name in sorted(names | {"mpcompare"}) if (sources := list(_sources(name)))}
    return {"torch": version("torch") or "none"} | {name: _hash(sources) for name, sources in found.items()}


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict) and isinstance(target := node.get("_target_"), str):
        yield target
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _targets(each)


def _sources(name: str) -> Iterator[tuple[str, Path]]:
    """Yields the files of a package or module, with their names within it. Nothing is imported."""
    spec = spec_of(name)
    for folder in map(Path, spec.submodule_search_locations or () if spec else ()):
        files = (path for path in sorted(folder.rglob("*.py")) if path.is_file())  # an editor's lock is a broken link
        yield from ((str(path.relative_to(folder)), path) for path in files)
    if spec and spec.has_location and not spec.submodule_search_locations:
        yield name, Path(str(spec.origin))
    if name == "mpcompare":
        yield from ((path.name, path) for path in sorted(CSRC.rglob("*")) if path.is_file())


def _hash(sources: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in sources:
        try:
            digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
        except OSError as error:
            expected = f"cannot be read ({error.strerror}): expected the sources of all that a _target_ names"
            raise InputError("code", path, expected) from error
    return digest.hexdigest()[:12]
