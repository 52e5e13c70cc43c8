"""Nodes of the configuration with a ``_target_``: the options that a group has, and the objects that nodes become."""

import inspect
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from mpcompare.command.faults import out_of_memory
from mpcompare.errors import InputError


def options(group: str) -> list[str]:
    """Returns the options of a group: those of conf/, of ``--config-dir``, and of installed packages."""
    return GlobalHydra.instance().config_loader().get_group_options(group)


def instantiate(node: Any, **values: Any) -> Any:
    """Returns the object that a node describes.

    Raises:
        InputError: from its constructor.
        InstantiationException: the object cannot be made.
    """
    try:
        return hydra.utils.instantiate(node, _convert_="all", **values)
    except InstantiationException as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise


def task_of(node: DictConfig) -> Any:
    """Returns the task with a maker of its model, which draws its weights when the seed is set.

    Raises:
        InputError: the node of its model, optimizer or schedule is wrong.
    """
    task: Any = OmegaConf.to_container(node, resolve=True)
    model = task.pop("model", None)
    if not isinstance(model, dict) or "_target_" not in model:
        raise InputError("task.model", model, "expected the _target_ of a torch.nn.Module, and its arguments")

    def make_model() -> Any:
        try:
            return instantiate(model)
        except InstantiationException as error:
            cause = error.__cause__ or error
            if out_of_memory(cause):
                raise cause from None
            expected = f"cannot be made ({type(cause).__name__}: {' '.join(str(cause).split())})"
            raise InputError("task.model._target_", model["_target_"], expected) from error

    for group in ("optimizer", "schedule"):
        _check_keys(group, task.get(group))
    return instantiate(task, model=make_model)


def _check_keys(group: str, node: Any) -> None:
    """Raises InputError for a key that the task's optimizer or schedule does not take: one of another's, say."""
    field = f"task.{group}"
    if not isinstance(node, dict) or "_target_" not in node:
        raise InputError(field, node, f"expected the _target_ of one; {group}={'|'.join(options(group))} chooses one")
    try:
        cls = hydra.utils.get_object(node["_target_"])
        takes = inspect.signature(cls).parameters
    except (ImportError, TypeError, ValueError):
        return  # Hydra says so when it makes one
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return
    for key, value in node.items():
        if key not in takes and not key.startswith("_"):
            expected = f"{cls.__name__} takes {', '.join(takes) or 'nothing'}; leave it out with ~{field}.{key}"
            raise InputError(f"{field}.{key}", value, expected)
