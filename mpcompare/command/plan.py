"""The plan of an entrant, from the configuration: nothing below knows Hydra."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mpcompare.command.entry_points import origin
from mpcompare.command.faults import WRONG_INPUT
from mpcompare.command.going_on import is_sweep
from mpcompare.command.nodes import instantiate, target_of, task_of
from mpcompare.entrant.sections import Evaluation, Examination, Inference, Monitoring, Resumption, Training
from mpcompare.errors import InputError, check_choice
from mpcompare.race.timetable import RaceStage, stages
from mpcompare.race.turns import Rules

if TYPE_CHECKING:
    from mpcompare.entrant.plan import Plan

Section = TypeVar("Section")
SECTIONS = {
    "train": Training, "eval": Evaluation, "monitor": Monitoring, "measure": Rules, "inference": Inference,
    "verdict": Examination,
}  # fmt: skip


def plan_of(cfg: DictConfig, goes_on: bool = False) -> "Plan":
    """Returns the plan of the entrant that this configuration describes. Raises InputError where a value is not
    accepted; the message has the name of its key.

    Args:
        cfg: the composed configuration.
        goes_on: whether its folder holds a part of the run, with which it goes on.
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
    target_of("data", OmegaConf.to_container(cfg.data, resolve=True))
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
        resume=_resumption(cfg, goes_on),
        **sections_of(cfg),
    )


def _resumption(cfg: DictConfig, goes_on: bool) -> Resumption:
    """Returns the point to resume from: a run that goes on resumes from its own folder."""
    if goes_on:
        return Resumption(Path(HydraConfig.get().runtime.output_dir), cfg.resume_older, goes_on=True)
    begins = cfg.resume is None or is_sweep(cfg)  # a sweep is named that has nothing of this run
    return Resumption(None if begins else Path(str(cfg.resume)).expanduser(), cfg.resume_older)


def rules_of(cfg: DictConfig) -> Rules:
    """Returns the rules of the race that this configuration describes. Raises InputError where one is not accepted."""
    return _section(Rules, cfg, "measure")


def sections_of(cfg: DictConfig) -> dict[str, Any]:
    """Returns the sections of the configuration by their names. Raises InputError where a value is not accepted."""
    return {name: _section(cls, cfg, name) for name, cls in SECTIONS.items()}


def _section(cls: type[Section], cfg: DictConfig, name: str) -> Section:
    """Returns a section of the configuration as a ``cls``, a dataclass whose fields are the keys of the section. Raises
    InputError where a key is unknown or missing, or its value is not accepted."""
    values: Any = OmegaConf.to_container(cfg[name], resolve=True)
    keys = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in keys:
            raise InputError(f"{name}.{key}", value, f"{name} takes {', '.join(keys)}")
    for key in keys:
        if key not in values:
            raise InputError(f"{name}.{key}", "", "expected a value, there is none")
    return cls(**values)


def stages_of(cfg: DictConfig, chosen: str, entrants: int) -> tuple[RaceStage, ...]:
    """Returns the stages of a job.

    Args:
        chosen: the name of its backend.
        entrants: number of entrants in its race, which share the budget of timing.
    """
    try:
        own = sections_of(cfg)
    except WRONG_INPUT:
        return stages(0, None, 0, 0, None)  # it fails at once
    train, measure, inference, verdict = (own[name] for name in ("train", "measure", "inference", "verdict"))
    is_baseline = chosen == OmegaConf.select(cfg, "report.baseline", throw_on_resolution_failure=False)
    return stages(
        train_steps=train.last_step,
        noise_runs=verdict.noise * is_baseline if verdict.enabled else None,
        timing_s=measure.budget_s / entrants,
        block_s=measure.block_s,
        inference_s=inference.budget_s if inference.enabled else None,
    )
