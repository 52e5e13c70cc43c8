"""``python -m mpcompare``: compose the configuration, run, save. ``--help`` says how."""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpcompare.errors import InputError, fail
from mpcompare.paths import CONF

if TYPE_CHECKING:
    from mpcompare.train import Job

# torch takes seconds to import, so it is imported where a run begins: --help and --cfg stay quick.

log = logging.getLogger("mpcompare")


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def run(cfg: DictConfig) -> None:
    """One job. Whatever ends it early is in its record; in a sweep the others go on."""
    from mpcompare.records import Recorder
    from mpcompare.train import run as train

    folder, chosen = Path(HydraConfig.get().runtime.output_dir), HydraConfig.get().runtime.choices
    for group in ("backend", "task", "data", "loss_scale"):
        if not isinstance(chosen.get(group), str):
            fail(f"{group}: expected one of {', '.join(_options(group))} (several: python -m mpcompare -m {group}=a,b)")
    config: Any = OmegaConf.to_container(cfg)  # as written: what cannot be resolved is a failed job, with a record
    identity = {
        "backend": chosen["backend"],
        "precision": config["precision"],
        "task": chosen["task"],
        "batch_size": config["task"].get("batch_size"),
        "seed": config["seed"],
        "config": config,
    }
    recorder = Recorder(folder, identity)
    try:
        recorder.result["config"] = OmegaConf.to_container(cfg, resolve=True)
        train(_job(cfg, chosen["backend"]), recorder)
    except KeyboardInterrupt:
        recorder.add(status="interrupted", error="interrupted from the keyboard")
        raise
    except Exception as error:
        known = _known(error)
        try:
            recorder.add(status="failed", error=known or f"{type(error).__name__}: {error}".splitlines()[0])
        except InputError:  # a full disk, say: without a record the report would not miss this job
            fail(known or str(error))
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            log.error(known, exc_info=None if known else error)
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


def _job(cfg: DictConfig, backend: str) -> "Job":
    """The configuration as plain values: nothing below knows Hydra."""
    from mpcompare.train import Job

    try:
        make_backend = hydra.utils.get_class(cfg.backend._target_)
    except (ImportError, ValueError) as error:
        raise InputError("backend._target_", cfg.backend._target_, f"expected a backend's class ({error})") from error
    return Job(
        backend=backend,
        make_backend=make_backend,
        task=_instantiate(cfg.task),
        load_data=_instantiate(cfg.data),
        loss_scale=_instantiate(cfg.loss_scale),
        precision=cfg.precision,
        engine=cfg.engine,
        device=cfg.device,
        seed=cfg.seed,
        steps=cfg.train.steps,
        warmup_steps=cfg.train.warmup_steps,
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

    from mpcompare.backend import BackendUnavailable

    if isinstance(error, (InputError, BackendUnavailable, HydraException, OmegaConfBaseException)):
        return " ".join(str(error).split())
    cpu_out_of_memory = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or cpu_out_of_memory:
        return f"out of memory, try a smaller task.batch_size or task.hidden ({str(error).splitlines()[0]})"
    return None


def main() -> None:
    """The command line: what a user got wrong is one line, and only a fault of ours is a traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors up instead of printing them
    try:
        run()
    except KeyboardInterrupt:
        print("mpcompare: interrupted; what was finished is written", file=sys.stderr)
        sys.exit(130)
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        fail(f"{group}={name}: expected one of {', '.join(error.options)}" if error.options else str(error))
    except (HydraException, OmegaConfBaseException) as error:
        override = getattr(error, "override", None)  # one that does not parse
        fail(f"{override + ': ' if override else ''}{error} {error.__cause__ or ''}")
    except InputError as error:
        fail(str(error))
    except ValueError as error:
        innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]
        if not innermost.f_globals["__name__"].startswith("hydra"):
            raise
        fail(str(error))


if __name__ == "__main__":
    main()
