"""``mpcompare.compare``: a sweep as a call, with the records and the processes of the command line."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import isroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpcompare import caller
from mpcompare.api.arguments import Arguments
from mpcompare.api.command import run_command
from mpcompare.api.objects import Objects, of_python, written
from mpcompare.errors import InputError, check_number, check_whole, in_full
from mpcompare.paths import CONF

if TYPE_CHECKING:
    from mpcompare.api.compared import Compared

ADDED = ("experiment", "ablation")  # groups of which conf/config.yaml chooses no option

# Everything that is slow to import, such as pandas, is imported in the call, so that ``import mpcompare`` is quick.


def compare(
    model: Any = None,
    loss: Any = None,
    data: Any = None,
    backends: Any = None,
    precision: Any = None,
    folder: str | Path | None = None,
    *,
    optimizer: Any = None,
    lr: float | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    **knobs: Any,
) -> "Compared":
    """Compares backends on a task, as ``python -m mpcompare -m`` does, and returns the report.

    Args:
        model: a ``torch.nn.Module``, its class, or a function that makes it; None: the network of ``task``.
        loss: the name of a loss, ``model`` where the network's output has one, a class of losses, or a callable of
            output and targets; None: the loss of the task, and ``model`` where a batch is a dict with labels.
        data: a ``DataLoader``, a ``Dataset``, tensors or arrays ``(x, y)``, or two of these, the second of which is
            held out; the tensors ``x_train, y_train, x_test, y_test``, or a function of the seed that returns them; an
            option of the group ``data`` such as ``digits``. None: ``auto``.
        backends: one or a list of names, classes, and functions ``step(model, optimizer, batch)`` that take a step and
            return its loss. Classes and functions take part under their own names. None: ``amp`` and ``fp32`` for a
            ``model``, ``amp`` alone where a ``precision`` is given, too; the backend of the settings for a ``task``.
        precision: one or a list, names or dtypes; None: ``auto``.
        folder: gets the records and the report; None: a new folder in ``multirun``, as the command makes it.
        optimizer: a word such as ``adamw``, a class of ``torch.optim``, a function of the parameters, or an optimizer.
        lr, batch_size, steps: learning rate, samples of a batch, training steps.
        knobs: the other settings, each as on the command line: ``train={"warmup_steps": 5}``,
            ``**{"task.clip_norm": 1.0}``.

    Raises:
        InputError: a value is not accepted, or no run finished.
    """
    from mpcompare.command.folders import check_folder, free

    out = None if folder is None else Path(folder).expanduser().absolute()
    objects = Objects()
    call = Arguments(model, loss, data, _all(backends), precision, optimizer, lr, batch_size, steps, knobs)
    with call.in_own_words(), tempfile.TemporaryDirectory(prefix="mpcompare-") as beside:
        if out is not None and out.exists():
            check_folder("folder", str(out), below=True)
        conf, pickled = Path(beside) / "conf", Path(beside) / "objects.pkl"
        overrides = overrides_of(call, objects, conf)
        _save(objects, pickled)
        out = out or Path(free("multirun/%Y-%m-%d/%H-%M-%S")).absolute()
        place = f"hydra.sweep.dir={written('folder', str(out))}"
        run_command(["--config-dir", str(conf), "-m", *overrides, place], pickled)
    from mpcompare.api.compared import read

    return read(out)


def overrides_of(call: Arguments, objects: Objects, conf: Path) -> list[str]:
    """Returns the overrides of a call, whose arguments are all checked, its data last.

    Args:
        objects: gets what must be carried into the processes of the race.
        conf: a folder for the options of backends.
    """
    from mpcompare.api import checks, network  # they import torch
    from mpcompare.instruments.machine import select_device

    numbers = of_python({name: getattr(call, name) for name in ("lr", "batch_size", "steps", "knobs")})
    call = replace(call, **numbers)
    if not call.backends and call.model is not None and not {"experiment", "backend"} & set(call.knobs):
        call = replace(call, backends=["amp", "fp32"] if call.precision is None else ["amp"])
    checks.check_knobs(call.knobs, Arguments.__dataclass_fields__, call.model is not None)
    for name in ("steps", "batch_size"):
        if getattr(call, name) is not None:
            check_whole(name, getattr(call, name), at_least=1)
    if call.lr is not None:
        check_number("lr", call.lr, above=0)
    device = str(call.knobs.get("device", "auto"))
    if "," not in device:  # with several devices, the runs say what is wrong
        select_device(device)
    overrides = list(_backends(objects, call.backends, conf))
    if call.precision is not None:
        overrides.append("precision=" + ",".join(checks.read_precisions(call.precision, call.backends, device)))
    overrides += network.overrides_of(call, objects)
    knobs = list(_knobs(call.knobs))
    for name, key in (("batch_size", "task.batch_size"), ("lr", "task.optimizer.lr"), ("steps", "train.steps")):
        if (value := getattr(call, name)) is not None:
            if any(knob.lstrip("+").startswith(f"{key}=") for knob in knobs):
                raise InputError(name, value, f"is set among the values of {key.split('.')[0]}, too: expected it once")
            overrides.append(f"++{key}={written(key, value)}")
    return [*overrides, *knobs]


def _backends(objects: Objects, backends: list[Any], conf: Path) -> Iterator[str]:
    """Yields the override that chooses the backends, and writes the option of each class into the folder ``conf``.
    Raises InputError where two have one name, one has a name of ours, or one is no backend."""
    from mpcompare.api.checks import check_backend
    from mpcompare.backends.loop import backend_of

    (conf / "backend").mkdir(parents=True)
    names: list[str] = []
    for backend in backends:
        if isinstance(backend, str):
            check_backend(backend)
        elif isroutine(backend):
            backend = backend_of(backend)
        elif not isinstance(backend, type):
            expected = "expected the name of a backend, its class, or a function step(model, optimizer, batch)"
            raise InputError("backends", backend, expected)
        elif not hasattr(backend, "PRECISIONS") or not (hasattr(backend, "train_step") or hasattr(backend, "forward")):
            expected = "is no backend: expected a class with PRECISIONS and train_step or forward (mpcompare.contract)"
            raise InputError("backends", backend.__name__, expected)
        names.append(name := backend if isinstance(backend, str) else backend.__name__)
        if names.count(name) > 1:
            raise InputError("backends", name, "is there twice")
        if isinstance(backend, type):
            if (CONF / "backend" / f"{name}.yaml").exists():  # Hydra would take ours: its folder comes first
                raise InputError("backends", name, "is the name of a backend of mpcompare: give yours another")
            (conf / "backend" / f"{name}.yaml").write_text(f"_target_: {objects.name(backend, name)}\n")
    if names:
        yield f"backend={','.join(names)}"


def _all(backends: Any) -> list[Any]:
    if isinstance(backends, (list, tuple)) and not backends:
        raise InputError("backends", [], "expected at least one name, class, or function step(model, optimizer, batch)")
    return list(backends) if isinstance(backends, (list, tuple)) else [] if backends is None else [backends]


def _knobs(knobs: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yields an override for each value; a section is a dict."""
    for name, value in knobs.items():
        if isinstance(value, Mapping) and not above and not value:
            raise InputError(name, "{}", "expected one of its values to be set")
        if isinstance(value, Mapping):
            yield from _knobs(value, f"{above}{name}.")
        else:
            # A group is chosen by a bare word, and no text with a dot is one.
            plus = "+" if not above and name in ADDED else ""
            bare = isinstance(value, str) and value.replace("_", "a").replace("/", "a").isalnum()
            yield f"{plus}{above}{name}={value if bare else written(f'{above}{name}', value)}"


def _save(objects: Objects, path: Path) -> None:
    """Saves the objects that must be carried. Raises InputError where one cannot be."""
    with objects.by_value():
        try:
            caller.save(objects.carried, path)
        except Exception:
            for name, thing in objects.carried.items():
                try:
                    caller.save({name: thing}, path)
                except Exception as error:
                    said = in_full(error)[:160]
                    expected = f"cannot be carried into the processes of a race ({said}): give a class or a function"
                    raise InputError(name, type(thing).__name__, expected) from error
            raise
