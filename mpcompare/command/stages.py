"""The stages of a job, from its configuration as it was written: one that is wrong fails later, with its reason."""

import math

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpcompare.race.timetable import RaceStage, stages


def stages_of(cfg: DictConfig, chosen: str, entrants: int) -> tuple[RaceStage, ...]:
    """Returns the stages of a job.

    Args:
        chosen: the name of its backend.
        entrants: number of those in its race, which share the budget of timing.
    """
    is_baseline = chosen == OmegaConf.select(cfg, "report.baseline", throw_on_resolution_failure=False)
    return stages(
        train_steps=_number(cfg, "train.steps") + _number(cfg, "train.warmup_steps"),
        noise_runs=(_number(cfg, "verdict.noise") * is_baseline) if _is_on(cfg, "verdict.enabled") else None,
        timing_s=_number(cfg, "measure.budget_s") / entrants,
        block_s=_number(cfg, "measure.block_s"),
        inference_s=_number(cfg, "inference.budget_s") if _is_on(cfg, "inference.enabled") else None,
    )


def _number(cfg: DictConfig, key: str) -> float:
    """Returns the value of a key; 0 where it is no number."""
    try:
        value = float(OmegaConf.select(cfg, key))
    except (OmegaConfBaseException, TypeError, ValueError):
        return 0.0
    return value if math.isfinite(value) else 0.0


def _is_on(cfg: DictConfig, key: str) -> bool:
    return OmegaConf.select(cfg, key, throw_on_resolution_failure=False) is True
