"""The plan of an entrant, from the configuration: nothing below knows Hydra."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mpcompare.command.entry_points import origin
from mpcompare.command.going_on import is_sweep
from mpcompare.command.nodes import instantiate, task_of
from mpcompare.errors import InputError, check_choice
from mpcompare.race.turns import Rules

if TYPE_CHECKING:
    from mpcompare.entrant.plan import Plan, Resumption

Section = TypeVar("Section")


def plan_of(cfg: DictConfig, goes_on: bool = False) -> "Plan":
    """Returns the plan of the entrant that this configuration describes.

    Args:
        cfg: the composed configuration.
        goes_on: whether its folder holds a part of the run, with which it goes on.

    Raises:
        InputError: a value is not accepted; the message has the name of its key.
    """
    from mpcompare.entrant import plan  # here, for it imports torch, which takes seconds
    from mpcompare.native.ops import ENGINES

    backend: Any = OmegaConf.to_container(cfg.backend, resolve=True)
    chosen = HydraConfig.get().runtime.choices["backend"]
    check_choice("engine", cfg.engine, ENGINES)  # backends without a choice are not asked
    try:
        make_backend = hydra.utils.get_class(cfg.backend._target_)
    except (ImportError, ValueError, TypeError, AttributeError, AssertionError) as error:
        expected = f"expected a backend's class{origin(chosen)} ({error})"
        raise InputError("backend._target_", cfg.backend._target_, expected) from error
    return plan.Plan(
        backend=chosen,
        make_backend=make_backend,
        options={key: value for key, value in backend.items() if key != "_target_"},
        is_baseline=chosen == cfg.report.baseline,
        task=task_of(cfg.task),
        task_config=OmegaConf.to_container(cfg.task, resolve=True),  # type: ignore[arg-type]  # its keys are words
        load_data=instantiate(cfg.data),
        loss_scale=instantiate(cfg.loss_scale),
        precision=cfg.precision,
        device=cfg.device,
        seed=cfg.seed,
        train=_section(plan.Training, cfg, "train"),
        resume=_resumption(cfg, goes_on),
        eval=_section(plan.Evaluation, cfg, "eval"),
        monitor=_section(plan.Monitoring, cfg, "monitor"),
        measure=rules_of(cfg),
        inference=_section(plan.Inference, cfg, "inference"),
        verdict=_section(plan.Examination, cfg, "verdict"),
    )


def _resumption(cfg: DictConfig, goes_on: bool) -> "Resumption":
    """Returns the point to resume from: of a run that goes on, its own folder."""
    from mpcompare.entrant.plan import Resumption

    if goes_on:
        return Resumption(Path(HydraConfig.get().runtime.output_dir), cfg.resume_older, goes_on=True)
    begins = cfg.resume is None or is_sweep(cfg)  # one of which that sweep has nothing
    return Resumption(None if begins else Path(str(cfg.resume)).expanduser(), cfg.resume_older)


def rules_of(cfg: DictConfig) -> Rules:
    """Returns the rules of the race that this configuration describes.

    Raises:
        InputError: one is not accepted.
    """
    return _section(Rules, cfg, "measure")


def _section(cls: type[Section], cfg: DictConfig, name: str) -> Section:
    """Returns a section of the configuration as a ``cls``, a dataclass whose fields are the keys of the section.

    Raises:
        InputError: a key is unknown or missing, or its value is not accepted.
    """
    values: Any = OmegaConf.to_container(cfg[name], resolve=True)
    keys = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in keys:
            raise InputError(f"{name}.{key}", value, f"{name} takes {', '.join(keys)}")
    for key in keys:
        if key not in values:
            raise InputError(f"{name}.{key}", "", "expected a value, there is none")
    return cls(**values)
