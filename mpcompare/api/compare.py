"""``mpcompare.compare``: a sweep as a call, with the records and the processes of the command line."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpcompare import caller
from mpcompare.api.command import run_command
from mpcompare.api.objects import Objects, written
from mpcompare.errors import InputError

if TYPE_CHECKING:
    from mpcompare.api.compared import Compared

# Everything that is slow to import, such as pandas, is imported in the call, so that ``import mpcompare`` is quick.


def compare(
    model: Callable[..., Any] | None = None,
    loss: Any = None,
    data: Any = None,
    backends: Any = None,
    precision: str | Sequence[str] | None = None,
    folder: str | Path | None = None,
    **knobs: Any,
) -> "Compared":
    """Compares backends on a task, as ``python -m mpcompare -m`` does, and returns the report.

    Args:
        model: a class or function that makes the network, a ``torch.nn.Module``; None: the network of ``task``.
        loss: ``cross_entropy``, ``mse``, or a callable of output and targets; None: that of the task.
        data: an option of the group ``data`` such as ``digits``; a function of the seed that returns ``x_train,
            y_train, x_test, y_test``; or these four tensors. None: ``auto``.
        backends: one or a list of names and classes. A class takes part under its own name.
        precision: one or a list; None: ``auto``.
        folder: of the records and the report; None: a new one in ``multirun``, as of the command.
        knobs: the other settings, each as on the command line: ``optimizer="adamw"``, ``train={"steps": 50}``,
            ``**{"task.batch_size": 64}``.

    Raises:
        InputError: a value is not accepted, or no run finished. The line is that of the command.
    """
    from mpcompare.api.compared import read

    out = _new_folder() if folder is None else Path(folder).expanduser().absolute()
    objects = Objects()
    with tempfile.TemporaryDirectory(prefix="mpcompare-") as beside:
        conf, pickled = Path(beside) / "conf", Path(beside) / "objects.pkl"
        overrides = [
            *_task(objects, model, loss, data, knobs),
            *_backends(objects, backends, conf),
            *(["precision=" + ",".join(_listed(precision))] if precision is not None else []),
            *_knobs(knobs),
            f"hydra.sweep.dir={written('folder', str(out))}",
        ]
        _save(objects, pickled)
        run_command(["--config-dir", str(conf), "-m", *overrides], pickled)
    return read(out)


def _task(objects: Objects, model: Any, loss: Any, data: Any, knobs: Mapping[str, Any]) -> Iterator[str]:
    """Yields the overrides of network, loss and data."""
    if model is not None:
        if isinstance(knobs.get("task"), str):
            raise InputError("task", knobs["task"], "expected either a task, or a model, whose task is module")
        if not callable(model) or (hasattr(model, "parameters") and not isinstance(model, type)):
            expected = "expected a class or function that makes the network, as in model=lambda: Net(64)"
            raise InputError("model", type(model).__name__, expected)
        yield "task=module"
        yield f"++task.model={written('model', objects.call(model, 'model'))}"
    if loss is not None:
        node = loss if isinstance(loss, str) else objects.function(_callable("loss", loss), "loss")
        yield f"++task.loss={written('loss', node)}"
    if isinstance(data, str):
        yield f"data={data}"
    elif data is not None:
        load = objects.function(data if callable(data) else _loader(data), "data")
        yield "data=function"
        yield f"++data={written('data', load)}"


def _callable(field: str, given: Any) -> Any:
    if not callable(given):
        raise InputError(field, given, "expected a name, or a callable")
    return given


def _loader(tensors: Any) -> Callable[[int], Any]:
    """Returns a function of the seed that returns data in memory."""
    if not isinstance(tensors, (tuple, list)) or len(tensors) != 4:
        expected = "expected a name, a function of the seed, or the tensors x_train, y_train, x_test, y_test"
        raise InputError("data", type(tensors).__name__, expected)

    def in_memory(seed: int) -> Any:
        return tuple(tensors)

    return in_memory


def _backends(objects: Objects, backends: Any, conf: Path) -> Iterator[str]:
    """Yields the override that chooses the backends, and writes the option of each class into the folder ``conf``.

    Raises:
        InputError: two have one name, or one is neither a name nor a class.
    """
    (conf / "backend").mkdir(parents=True)
    names: list[str] = []
    for backend in [] if backends is None else _listed(backends):
        if not isinstance(backend, (str, type)):
            raise InputError("backends", backend, "expected the name of a backend, or its class")
        names.append(name := backend if isinstance(backend, str) else backend.__name__)
        if names.count(name) > 1:
            raise InputError("backends", name, "is there twice")
        if isinstance(backend, type):
            (conf / "backend" / f"{name}.yaml").write_text(f"_target_: {objects.name(backend, name)}\n")
    if names:
        yield f"backend={','.join(names)}"


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _knobs(knobs: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yields an override for each value; a section is a dict."""
    for name, value in knobs.items():
        if isinstance(value, Mapping) and not above and not value:
            raise InputError(name, "{}", "expected one of its values to be set")
        if isinstance(value, Mapping):
            yield from _knobs(value, f"{above}{name}.")
        else:
            # A group is chosen by a bare word, and no text with a dot is one.
            bare = isinstance(value, str) and value.replace("_", "a").replace("/", "a").isalnum()
            yield f"{above}{name}={value if bare else written(f'{above}{name}', value)}"


def _save(objects: Objects, path: Path) -> None:
    """Saves the objects that must be carried.

    Raises:
        InputError: one cannot be.
    """
    with objects.by_value():
        for name, thing in objects.carried.items():
            try:
                caller.save({name: thing}, path)
            except Exception as error:
                expected = f"cannot be carried into the processes of a race ({type(error).__name__}: {error})"
                raise InputError(name, type(thing).__name__, expected) from error
        caller.save(objects.carried, path)


def _new_folder() -> Path:
    """Returns the folder that the command would take, or, where that is there already, one with a number behind."""
    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    names = (f"{now}{'' if number == 1 else f'-{number}'}" for number in count(1))
    return next(path for path in (Path("multirun").absolute() / name for name in names) if not path.exists())
