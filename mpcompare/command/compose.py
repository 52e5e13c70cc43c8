"""The composed configuration for programs that are no Hydra jobs."""

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpcompare.command.nodes import options
from mpcompare.errors import InputError
from mpcompare.paths import CONF


def composed(overrides: Sequence[str]) -> DictConfig:
    """Returns conf/config.yaml with ``overrides``, as on the command line. Raises InputError where an override is not
    accepted."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            cfg = compose("config", list(overrides))
            OmegaConf.resolve(cfg.task)
        except (HydraException, OmegaConfBaseException) as error:
            raise InputError("overrides", " ".join(overrides), str(error)) from error
    return cfg


def options_of_group(group: str) -> list[str]:
    """Returns the options of a group of conf/."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return options(group)
