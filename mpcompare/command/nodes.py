"""The composed configuration, the options that a group has, and the objects that nodes with a ``_target_`` become."""

import inspect
import pydoc
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpcompare import caller
from mpcompare.errors import InputError, did_you_mean, fault_of_call, in_full, out_of_memory
from mpcompare.paths import CONF

OF_HYDRA = ("_target_", "_args_", "_recursive_", "_convert_", "_partial_")  # keys of a node that are no arguments
ANY_OPTIMIZER = "mpcompare.tasks.any_optimizer.AnyOptimizer"


def options(group: str) -> list[str]:
    """Returns the options of a group: from conf/, from ``--config-dir``, and from installed packages; also in a program
    that is no job of Hydra's."""
    begun = GlobalHydra.instance().is_initialized()
    with nullcontext() if begun else hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return GlobalHydra.instance().config_loader().get_group_options(group)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Returns conf/config.yaml with ``overrides``, as on the command line, in a program that is no job of Hydra's.
    Raises InputError where an override is not accepted."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            cfg = hydra.compose("config", list(overrides))
            OmegaConf.resolve(cfg.task)
        except (HydraException, OmegaConfBaseException) as error:
            raise InputError("overrides", " ".join(overrides), str(error)) from error
    return cfg


def instantiate(node: Any, **values: Any) -> Any:
    """Returns the object that a node describes.

    Raises:
        InputError: from its constructor.
        InstantiationException: the object cannot be made.
    """
    try:
        made = _with_functions(OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
        return _made(made, values) if isinstance(made, dict) else made
    except InstantiationException as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise
    except (InputError, OmegaConfBaseException):
        raise
    except Exception as error:  # Hydra 1.4 hands on what the constructor raises
        raise InstantiationException(f"Error in call to target {node['_target_']}: {error!r}") from error


def _made(node: dict[Any, Any], values: Mapping[str, Any]) -> Any:
    """Returns what Hydra makes of a node and of more ``values``. The node may hold objects.

    Hydra 1.4 warns that a ``_target_`` runs any code. It is there for that.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*_execution_whitelist_", UserWarning)
        return hydra.utils.instantiate(OmegaConf.create(node, flags={"allow_objects": True}), _convert_="all", **values)


def _with_functions(node: Any) -> Any:
    """Returns a node with the functions themselves in place of nodes with ``_partial_``.

    Hydra 1.3.8 and later check such a function in each call, which takes longer than many a loss, and a step calls it.
    """
    if isinstance(node, list):
        return [_with_functions(each) for each in node]
    if not isinstance(node, dict):
        return node
    caller.check(node.get("_target_"))
    if node.get("_recursive_", True):
        node = {key: _with_functions(value) for key, value in node.items()}
    if node.get("_partial_") is not True:
        return node
    made = _made(node, {})
    return partial(made.func, *made.args, **made.keywords) if made.args or made.keywords else made.func


def task_of(node: DictConfig) -> Any:
    """Returns the task with a maker of its model, which draws its weights when the seed is set. Raises InputError where
    the node of its model, loss, optimizer or schedule is wrong."""
    task: Any = OmegaConf.to_container(node, resolve=True)
    model = task.pop("model", None)
    if not isinstance(model, dict) or "_target_" not in model:
        raise InputError("task.model", model, "expected the _target_ of a torch.nn.Module, and its arguments")
    made = target_of("task.model", model)
    _check_keys("task.model", made, model)
    named = {key: value for key, value in model.items() if key not in OF_HYDRA}
    if fault := fault_of_call(made, *model.get("_args_", ()), **named):
        expected = f"{fault}: its arguments are set as +task.model.KEY=VALUE"
        raise InputError("task.model._target_", model["_target_"], expected)
    if isinstance(loss := task.get("loss"), dict):
        target_of("task.loss", loss)

    def make_model() -> Any:
        try:
            return instantiate(model)
        except (InstantiationException, SystemExit) as error:
            cause = error.__cause__ or error
            if out_of_memory(cause):
                raise cause from None
            expected = f"cannot be made ({type(cause).__name__}: {' '.join(str(cause).split())})"
            raise InputError("task.model._target_", model["_target_"], expected) from error

    for group in ("optimizer", "schedule"):
        cls = target_of(f"task.{group}", task.get(group))
        _check_keys(f"task.{group}", cls, task[group])
        task[group] = _of_torch(cls, task[group])
    return instantiate(task, model=make_model)


def target_of(field: str, node: Any) -> Any:
    """Returns what the ``_target_`` of a node names. Raises InputError where there is none, or it cannot be
    imported."""
    if not isinstance(node, dict) or "_target_" not in node:
        group = field.removeprefix("task.")
        raise InputError(field, node, f"expected the _target_ of one; {group}={'|'.join(options(group))} chooses one")
    target = str(node["_target_"])
    if target == "???":
        raise InputError(f"{field}._target_", target, "expected the dotted name of a class, such as torch.optim.RAdam")
    caller.check(target)
    try:
        if (found := pydoc.locate(target)) is not None:
            return found
        names = accumulate(target.split("."), "{}.{}".format)
        owners = [(name, owner) for name in names if (owner := pydoc.locate(name)) is not None]
    except pydoc.ErrorDuringImport as error:
        if isinstance(error.value, KeyboardInterrupt):
            raise error.value from None
        said = in_full(error.value or error)
        raise InputError(f"{field}._target_", target, f"cannot be imported ({said})") from error
    if not owners:
        raise InputError(f"{field}._target_", target, f"there is no module {target.partition('.')[0]}")
    name, owner = owners[-1]
    missing = target.removeprefix(f"{name}.").partition(".")[0]
    raise InputError(f"{field}._target_", target, f"{name} has no {missing}{did_you_mean(missing, dir(owner))}")


def _of_torch(cls: Any, node: dict[str, Any]) -> dict[str, Any]:
    """Returns the node of ``cls``; one of torch's optimizers becomes the node of an :class:`AnyOptimizer`."""
    if not _is_torchs(cls):
        return node
    own: dict[str, Any] = {key: node[key] for key in ("lr", "weight_decay", "groups") if key in node}
    settings = {key: value for key, value in node.items() if key not in own and not key.startswith("_")}
    return {"_target_": ANY_OPTIMIZER, "name": node["_target_"], **own, "settings": settings}


def _is_torchs(cls: Any) -> bool:
    from torch.optim import Optimizer

    return isinstance(cls, type) and issubclass(cls, Optimizer)


def _check_keys(field: str, cls: Any, node: dict[str, Any]) -> None:
    """Raises InputError for a key that the task's optimizer or schedule does not take: one of another's, say."""
    try:
        takes = inspect.signature(cls).parameters
    except (TypeError, ValueError):
        return  # Hydra says so when it makes one
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return
    for key, value in node.items():
        ours = _is_torchs(cls) and (key == "groups" or (key == "weight_decay" and value is None))
        if key not in takes and not key.startswith("_") and not ours:
            names = f"{', '.join(takes) or 'nothing'}{did_you_mean(key, takes)}"
            raise InputError(f"{field}.{key}", value, f"{cls.__name__} takes {names}; leave it out with ~{field}.{key}")
