"""Objects of the program that called ``mpcompare.compare``: a class of a notebook, a lambda, data in memory.

The processes of a race cannot import such objects, because no file holds them. The caller saves them with cloudpickle
and names the file in the environment. Each object then has a name in this module, and a run's configuration says
``mpcompare.caller.Net`` as it says ``my_package.Net`` of a class that can be imported.
"""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mpcompare.errors import InputError

FILE = "MPCOMPARE_CALLER"  # the variable of the environment


class UnknownError(InputError, AttributeError):
    """A name that nobody carried. pickle asks modules for the names that it saves, and expects AttributeError."""


def save(objects: Mapping[str, Any], path: Path) -> None:
    """Writes objects, each under its name in this module. Raises the errors of ``pickle`` where an object cannot be
    saved, such as an object with an open file."""
    import cloudpickle  # here: a command needs none

    path.write_bytes(cloudpickle.dumps(dict(objects)))


def check(target: object) -> None:
    """Checks that a name of this module can be known: Hydra and pydoc would say no more than that a module is missing.
    Raises UnknownError where ``target`` is such a name, and nobody carried any object."""
    if str(target).startswith(f"{__name__}.") and FILE not in os.environ:
        __getattr__(str(target).removeprefix(f"{__name__}."))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    path = os.environ.get(FILE)
    if path is None:
        known = "is known only to the program that called mpcompare.compare: move it into a module that can be imported"
        raise UnknownError("mpcompare.caller", name, known)
    objects = _load(path)
    if name not in objects:
        raise AttributeError(f"{path} holds {', '.join(objects)}, and no {name}")
    return objects[name]


@cache
def _load(path: str) -> dict[str, Any]:
    import cloudpickle

    return cloudpickle.loads(Path(path).read_bytes())
