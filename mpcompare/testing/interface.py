"""The requirements on a backend's class and on its methods, which need no step."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from mpcompare.contract import PHASES, Backend, in_one_piece, options_of
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.task import Task

ANSWERS = [name for name, each in vars(Backend).items() if inspect.isfunction(each) and not name.startswith("_")]


def of_the_class(backend_class: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """The class: its precisions, its constructor's arguments."""
    if not isinstance(backend_class, type):
        yield "it is no class"
        return
    precisions = getattr(backend_class, "PRECISIONS", None)
    if not isinstance(precisions, tuple) or not precisions or not set(precisions) <= set(PRECISIONS):
        yield f"PRECISIONS is {precisions!r}, expected a tuple of {', '.join(PRECISIONS)}"
    parameters = list(inspect.signature(backend_class).parameters.values())
    if [p.name for p in parameters[:4]] != ["model", "task", "precision", "loss_scale"]:
        names = ", ".join(p.name for p in parameters[:4])
        yield f"the constructor takes {names or 'nothing'}, expected model, task, precision, loss_scale, then options"
    for p in parameters[4:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            yield f"the constructor takes {p}, expected each option by name, so that a wrong one can be refused"
        elif p.default is p.empty:
            yield f"option {p.name} has no default"
    own = options_of(backend_class)
    for name in options:
        if name not in own:
            yield f"option {name} was given, and the constructor does not take it"


def of_the_interface(backend: Any) -> Iterator[str]:
    """The methods: all phases or one step, and all answers."""
    phases = [name for name in PHASES if callable(getattr(backend, name, None))]
    missing = [name for name in PHASES if name not in phases]
    whole = in_one_piece(backend)
    if phases and missing:
        yield f"it offers {', '.join(phases)} and not {', '.join(missing)}: expected all phases, or none and train_step"
    elif not phases and not whole:
        yield f"it offers no step: expected {', '.join(PHASES)}, or train_step"
    elif not whole:
        idle = getattr(backend, "IDLE_PHASES", None)
        if not isinstance(idle, tuple) or not set(idle) <= set(PHASES):
            yield f"IDLE_PHASES is {idle!r}, expected a tuple of phases"
        if not isinstance(task := getattr(backend, "task", None), Task):
            yield f"task is {task!r}, expected the task that it was made with"
    for name in ANSWERS:
        if not callable(getattr(backend, name, None)):
            yield f"{name}() is missing"
    if not isinstance(getattr(backend, "engine", None), str):
        yield f"engine is {getattr(backend, 'engine', None)!r}, expected a string"
    if not is_skipped(getattr(backend, "skipped", None)):
        yield f"skipped is {getattr(backend, 'skipped', None)!r}, expected a bool or a 0-d tensor"


def is_skipped(value: object) -> bool:
    """Returns whether a value can say if a step was skipped."""
    return isinstance(value, bool) or (isinstance(value, Tensor) and value.dim() == 0)
