"""One job of Hydra's: the configuration becomes plain values, and whatever ends the run early is in its record."""

import hashlib
import inspect
import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpcompare.command.entry_points import origin
from mpcompare.errors import InputError, fail
from mpcompare.interrupt import uninterrupted
from mpcompare.race.turns import Rules, Turns, alone

if TYPE_CHECKING:
    from mpcompare.entrant.plan import Plan

# torch takes seconds to import, so it is imported where a run begins: --help and --cfg stay quick.

log = logging.getLogger("mpcompare")

# What holds values of its own in conf/config.yaml, with one that is often set.
SECTIONS = {
    "train": "steps=50", "eval": "every=10", "monitor": "every=10", "measure": "budget_s=60",
    "inference": "enabled=false", "verdict": "enabled=false", "report": "baseline=amp",
}  # fmt: skip


def run(cfg: DictConfig, drive: Callable[[Turns], None] | None = None, shared: Path | None = None) -> None:
    """One job: Hydra's task function. In a sweep a job that fails is a record, and the others go on.

    Args:
        cfg: the composed configuration.
        drive: lets the entrant take its turns; None: alone, in this process.
        shared: the folder in which the entrants of a race share values; None: with nobody.
    """
    from mpcompare.entrant.entrant import compete
    from mpcompare.records import Recorder
    from mpcompare.shared import Shared

    folder = Path(HydraConfig.get().runtime.output_dir)
    recorder = Recorder(folder, identity(cfg))
    try:
        recorder.result["config"] = OmegaConf.to_container(cfg, resolve=True)
        with closing(compete(_plan(cfg, folder), recorder, Shared(shared))) as turns:
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
    """What a record knows before anything has run; ends the program where a group's choice is no option, or a
    section has no values."""
    hydra_config = HydraConfig.get()
    chosen = hydra_config.runtime.choices
    for group in ("backend", "task", "optimizer", "schedule", "data", "loss_scale"):
        if not isinstance(chosen.get(group), str):
            fail(f"{group}: expected one of {', '.join(_options(group))} (several: python -m mpcompare -m {group}=a,b)")
    for section, example in SECTIONS.items():
        if not isinstance(cfg.get(section), DictConfig):
            fail(f"{section}={cfg.get(section)}: expected one of its values to be set, as in {section}.{example}")
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


def _plan(cfg: DictConfig, folder: Path) -> "Plan":
    """The configuration as plain values: nothing below knows Hydra. The run writes into ``folder``."""
    from mpcompare.checkpoints import CHECKPOINTS
    from mpcompare.entrant.plan import Plan

    backend: Any = OmegaConf.to_container(cfg.backend, resolve=True)
    chosen = HydraConfig.get().runtime.choices["backend"]
    try:
        make_backend = hydra.utils.get_class(cfg.backend._target_)
    except (ImportError, ValueError) as error:
        expected = f"expected a backend's class{origin(chosen)} ({error})"
        raise InputError("backend._target_", cfg.backend._target_, expected) from error
    return Plan(
        backend=chosen,
        make_backend=make_backend,
        options={key: value for key, value in backend.items() if key != "_target_"},
        task=_task(cfg.task),
        load_data=_instantiate(cfg.data),
        loss_scale=_instantiate(cfg.loss_scale),
        precision=cfg.precision,
        device=cfg.device,
        seed=cfg.seed,
        steps=cfg.train.steps,
        warmup_steps=cfg.train.warmup_steps,
        deterministic=cfg.train.deterministic,
        block_s=rules(cfg).block_s,
        examine=cfg.verdict.enabled,
        noise=cfg.verdict.noise,
        is_baseline=chosen == cfg.report.baseline,
        eval_every=cfg.eval.every,
        monitor_every=cfg.monitor.every,
        inference=cfg.inference.enabled,
        inference_s=cfg.inference.budget_s,
        inference_batch=cfg.inference.batch_size,
        checkpoint_every=cfg.train.checkpoint_every,
        checkpoints=folder / CHECKPOINTS,
        resume=None if cfg.resume is None else Path(str(cfg.resume)).expanduser(),
        resume_older=cfg.resume_older,
        task_config=OmegaConf.to_container(cfg.task, resolve=True),  # type: ignore[arg-type]  # its keys are words
    )


def _task(node: DictConfig) -> Any:
    """The task with a maker of its model, which draws its weights when the seed is set."""
    task: Any = OmegaConf.to_container(node, resolve=True)
    model = task.pop("model", None)
    if not isinstance(model, dict) or "_target_" not in model:
        raise InputError("task.model", model, "expected the _target_ of a torch.nn.Module, and its arguments")

    def make_model() -> Any:
        try:
            return _instantiate(model)
        except InstantiationException as error:
            cause = error.__cause__ or error
            if _out_of_memory(cause):
                raise cause from None
            expected = f"cannot be made ({type(cause).__name__}: {' '.join(str(cause).split())})"
            raise InputError("task.model._target_", model["_target_"], expected) from error

    for part in ("optimizer", "schedule"):
        _check_keys(part, task.get(part))
    return _instantiate(task, model=make_model)


def _check_keys(group: str, node: Any) -> None:
    """Raises InputError for a key that the task's optimizer or schedule does not take: one of another's, say."""
    field = f"task.{group}"
    if not isinstance(node, dict) or "_target_" not in node:
        raise InputError(field, node, f"expected the _target_ of one; {group}={'|'.join(_options(group))} chooses one")
    try:
        cls = hydra.utils.get_object(node["_target_"])
        takes = inspect.signature(cls).parameters
    except (ImportError, TypeError, ValueError):
        return  # which Hydra says when it makes one
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return
    for key, value in node.items():
        if key not in takes and not key.startswith("_"):
            expected = f"{cls.__name__} takes {', '.join(takes) or 'nothing'}; leave it out with ~{field}.{key}"
            raise InputError(f"{field}.{key}", value, expected)


def _options(group: str) -> list[str]:
    """What can be chosen: of conf/, of ``--config-dir``, and of installed packages."""
    return GlobalHydra.instance().config_loader().get_group_options(group)


def _instantiate(node: Any, **values: Any) -> Any:
    try:
        return hydra.utils.instantiate(node, _convert_="all", **values)
    except InstantiationException as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise


def _known(error: Exception) -> str | None:
    """One line for what a user can change; None for a fault of ours, which deserves its traceback."""
    from mpcompare.contract import BackendUnavailable

    if isinstance(error, (InputError, BackendUnavailable, HydraException, OmegaConfBaseException)):
        return " ".join(str(error).split())
    if _out_of_memory(error):
        return f"out of memory, try a smaller task.batch_size or task.model ({_first_line(error)})"
    return None


def _out_of_memory(error: BaseException) -> bool:
    import torch

    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def _first_line(error: Exception) -> str:
    return (f"{type(error).__name__}: {error}".splitlines())[0]
