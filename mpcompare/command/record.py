"""The record of a run before anything has run."""

import hashlib
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mpcompare.command.faults import check_appended
from mpcompare.command.nodes import options
from mpcompare.errors import check_choice, fail, fails_on_input_errors
from mpcompare.precision import PRECISIONS

# The sections of conf/config.yaml, with a value in each that is often set.
SECTIONS = {
    "train": "steps=50", "eval": "every=10", "monitor": "every=10", "measure": "budget_s=60",
    "inference": "enabled=false", "verdict": "enabled=false", "report": "baseline=amp",
}  # fmt: skip
# Keys that name a user's own code, with an example of each.
OWN = {
    "task.model": "task.model._target_=my_package.Net, its arguments as +task.model.KEY=VALUE",
    "data": "data._target_=my_package.load, its arguments as +data.KEY=VALUE",
}


def record_at_start(cfg: DictConfig) -> dict[str, Any]:
    """Returns the first entries of ``result.json``: the choices of a run, and its configuration as it is written.

    Ends the program where the choice of a group is none of its options, a section is replaced by a value, the precision
    is unknown, or a name that is needed is missing.
    """
    hydra_config = HydraConfig.get()
    chosen = hydra_config.runtime.choices
    for group in ("backend", "task", "optimizer", "schedule", "data", "loss_scale"):
        if not isinstance(chosen.get(group), str):
            fail(f"{group}: expected one of {', '.join(options(group))} (several: python -m mpcompare -m {group}=a,b)")
    for section, example in SECTIONS.items():
        if not isinstance(cfg.get(section), DictConfig):
            fail(f"{section}={cfg.get(section)}: expected one of its values to be set, as in {section}.{example}")
    config: Any = OmegaConf.to_container(cfg)  # as written: a value that cannot be resolved fails the job in its record
    for key, example in OWN.items():
        node = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
        if isinstance(node, DictConfig) and OmegaConf.is_missing(node, "_target_"):
            fail(f"{key}._target_: expected what to import, as in {example}")
    with fails_on_input_errors():
        check_appended(hydra_config.overrides.task, chosen)
        if "${" not in str(config["precision"]):
            check_choice("precision", config["precision"], ("auto", *PRECISIONS))
    sweep = None
    if hydra_config.mode == RunMode.MULTIRUN:  # the same for all its jobs wherever they run, and without saying where
        folder = Path(hydra_config.runtime.cwd) / hydra_config.sweep.dir
        sweep = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return {
        "backend": chosen["backend"],
        "precision": config["precision"],
        "task": chosen["task"],
        "batch_size": config["task"].get("batch_size"),
        "seed": config["seed"],
        "sweep": sweep,
        "config": config,
    }
