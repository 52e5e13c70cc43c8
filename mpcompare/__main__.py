"""``python -m mpcompare``: compose the configuration, run, save. ``--help`` says how."""

import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpcompare.errors import InputError
from mpcompare.paths import CONF

# torch takes seconds to import, so it is imported where a run begins: --help and --cfg stay quick.

log = logging.getLogger("mpcompare")


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def run(cfg: DictConfig) -> None:
    """One job. In a sweep a job that fails is a row of the report, and the others go on."""
    from mpcompare import train
    from mpcompare.backend import BackendUnavailable

    folder = Path(HydraConfig.get().runtime.output_dir)
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        try:
            result = train.run(_job(cfg), folder)
        except (InputError, BackendUnavailable) as error:
            if not in_sweep:
                fail(str(error))
            log.error("%s", error)
            return
    except Exception:
        if not in_sweep:
            raise
        log.exception("the job failed")
        return
    log.info(
        "%s %s (%s) on %s: %.4g ms a step, final loss %.4f. Written to %s",
        *(result[key] for key in ("backend", "precision", "engine", "dataset", "step_ms_p50", "final_loss")),
        folder,
    )


def _job(cfg: DictConfig) -> Any:
    """The configuration as plain arguments: nothing below knows Hydra."""
    from mpcompare import train

    chosen = HydraConfig.get().runtime.choices
    return train.Job(
        backend=chosen["backend"],
        make_backend=hydra.utils.get_class(cfg.backend._target_),
        task_name=chosen["task"],
        task=_instantiate(cfg.task),
        load_data=_instantiate(cfg.data),
        loss_scale=_instantiate(cfg.loss_scale),
        precision=cfg.precision,
        engine=cfg.engine,
        device=cfg.device,
        seed=cfg.seed,
        steps=cfg.train.steps,
        warmup_steps=cfg.train.warmup_steps,
        config=cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True)),
    )


def _instantiate(node: DictConfig) -> Any:
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        raise error.__cause__ if isinstance(error.__cause__, InputError) else error from None


def fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr and exit code 2."""
    print(f"mpcompare: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """The command line: what a user got wrong is one line, and only a fault of ours is a traceback."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its errors up instead of printing them
    try:
        run()
    except KeyboardInterrupt:
        print("mpcompare: interrupted; steps.csv holds every step that was finished", file=sys.stderr)
        sys.exit(130)
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        fail(f"{group}={name}: expected one of {', '.join(error.options)}" if error.options else str(error))
    except (HydraException, OmegaConfBaseException) as error:
        override = getattr(error, "override", None)  # one that does not parse
        fail(f"{override + ': ' if override else ''}{error} {error.__cause__ or ''}")


if __name__ == "__main__":
    main()
