"""One job of Hydra's: the configuration becomes plain values, and whatever ends the run early is in its record."""

import hashlib
import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpcompare.errors import InputError, fail
from mpcompare.interrupt import uninterrupted
from mpcompare.paths import CONF
from mpcompare.race.turns import Rules, Turns, alone

if TYPE_CHECKING:
    from mpcompare.entrant.entrant import Job

# torch takes seconds to import, so it is imported where a run begins: --help and --cfg stay quick.

log = logging.getLogger("mpcompare")


def run(cfg: DictConfig, drive: Callable[[Turns], None] | None = None) -> None:
    """One job: Hydra's task function. In a sweep a job that fails is a record, and the others go on.

    Args:
        cfg: the composed configuration.
        drive: lets the entrant take its turns; None: alone, in this process.
    """
    from mpcompare.entrant.entrant import run as turns_of
    from mpcompare.records import Recorder

    folder = Path(HydraConfig.get().runtime.output_dir)
    recorder = Recorder(folder, identity(cfg))
    try:
        recorder.result["config"] = OmegaConf.to_container(cfg, resolve=True)
        with closing(turns_of(_job(cfg), recorder)) as turns:
            (drive or partial(alone, rules=rules(cfg)))(turns)
    except KeyboardInterrupt:
        with uninterrupted():
            if recorder.result["status"] == "running":
                recorder.add(status="interrupted", error="interrupted")
        raise
    except Exception as error:
        known = _known(error)
        try:
            recorder.add(status="failed", error=known or _first_line(error))
        except InputError:  # a full disk, say: without a record the report would not miss this job
            fail(known or str(error))
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            log.error(known or _first_line(error), exc_info=None if known else error)
        elif known:
            fail(known)
        else:
            raise
        return
    result = recorder.result
    log.info(
        "%s %s (%s) on %s: %.4g ms a step, final loss %.4f. Written to %s",
        *(result[key] for key in ("backend", "precision", "engine", "dataset", "step_ms_p50", "final_loss")),
        folder,
    )


def identity(cfg: DictConfig) -> dict[str, Any]:
    """What a record knows before anything has run; ends the program where a group's choice is no option."""
    hydra_config = HydraConfig.get()
    chosen = hydra_config.runtime.choices
    for group in ("backend", "task", "data", "loss_scale"):
        if not isinstance(chosen.get(group), str):
            fail(f"{group}: expected one of {', '.join(_options(group))} (several: python -m mpcompare -m {group}=a,b)")
    config: Any = OmegaConf.to_container(cfg)  # as written: what cannot be resolved is a failed job, with a record
    in_sweep = hydra_config.mode == RunMode.MULTIRUN
    return {
        "backend": chosen["backend"],
        "precision": config["precision"],
        "task": chosen["task"],
        "batch_size": config["task"].get("batch_size"),
        "seed": config["seed"],
        "sweep": _fingerprint(Path(hydra_config.runtime.cwd) / hydra_config.sweep.dir) if in_sweep else None,
        "config": config,
    }


def _fingerprint(folder: Path) -> str:
    """A sweep's folder, the same for all its jobs wherever they run, without saying where that is."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:8]


def rules(cfg: DictConfig) -> Rules:
    """When timing ends; raises InputError."""
    return Rules(cfg.measure.rel_ci, cfg.measure.budget_s, cfg.measure.block_s)


def _job(cfg: DictConfig) -> "Job":
    """The configuration as plain values: nothing below knows Hydra."""
    from mpcompare.entrant.entrant import Job

    backend: Any = OmegaConf.to_container(cfg.backend, resolve=True)
    try:
        make_backend = hydra.utils.get_class(cfg.backend._target_)
    except (ImportError, ValueError) as error:
        raise InputError("backend._target_", cfg.backend._target_, f"expected a backend's class ({error})") from error
    return Job(
        backend=HydraConfig.get().runtime.choices["backend"],
        make_backend=make_backend,
        options={key: value for key, value in backend.items() if key != "_target_"},
        task=_instantiate(cfg.task),
        load_data=_instantiate(cfg.data),
        loss_scale=_instantiate(cfg.loss_scale),
        precision=cfg.precision,
        engine=cfg.engine,
        device=cfg.device,
        seed=cfg.seed,
        steps=cfg.train.steps,
        warmup_steps=cfg.train.warmup_steps,
        deterministic=cfg.train.deterministic,
        block_s=rules(cfg).block_s,
        examine=cfg.verdict.enabled,
        noise=cfg.verdict.noise,
        is_baseline=HydraConfig.get().runtime.choices["backend"] == cfg.report.baseline,
    )


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _instantiate(node: DictConfig) -> Any:
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        raise error.__cause__ if isinstance(error.__cause__, InputError) else error from None


def _known(error: Exception) -> str | None:
    """One line for what a user can change; None for a fault of ours, which deserves its traceback."""
    import torch

    from mpcompare.contract import BackendUnavailable

    if isinstance(error, (InputError, BackendUnavailable, HydraException, OmegaConfBaseException)):
        return " ".join(str(error).split())
    cpu_out_of_memory = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or cpu_out_of_memory:
        return f"out of memory, try a smaller task.batch_size or task.hidden ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (f"{type(error).__name__}: {error}".splitlines())[0]
