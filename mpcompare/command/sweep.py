"""The jobs of a sweep, and the races that they form."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mpcompare import records
from mpcompare.command.record import record_at_start
from mpcompare.errors import InputError

# The jobs of one race may differ in these: in how they compute, never in what.
HOW = ("backend", "precision", "engine", "loss_scale")


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        config: composed, with Hydra's own node.
        name: its folder below the sweep's.
        record_at_start: the first entries of its ``result.json``.
        resolved: the configuration as plain values; as it is written where it cannot be resolved, which fails the job.
    """

    config: DictConfig
    overrides: list[str]
    name: str
    folder: Path
    record_at_start: dict[str, Any]
    resolved: dict[str, Any]

    def ended(self) -> JobReturn:
        """Returns the job for Hydra's sweeper. One that failed is a row of the report, not an exception that ends the
        sweep."""
        return JobReturn(
            overrides=self.overrides,
            cfg=_without_hydra(self.config),
            hydra_cfg=OmegaConf.masked_copy(self.config, ["hydra"]),
            working_dir=str(self.folder),
            task_name=str(self.config.hydra.job.name),
            status=JobStatus.COMPLETED,
            _return_value=None,
        )


def jobs_of(hydra: HydraContext, sweep: DictConfig, overrides: Sequence[Sequence[str]], first: int) -> list[Job]:
    """Returns the jobs with these overrides, numbered from ``first`` on, and makes their folders.

    Raises:
        InputError: two share a folder, or one cannot be written or holds a run already.
    """
    jobs = [_job(hydra, sweep, first + i, list(each)) for i, each in enumerate(overrides)]
    for folder in (folders := [job.folder for job in jobs]):
        if folders.count(folder) > 1:
            raise InputError("hydra.sweep.subdir", folder.name, "expected a folder of its own for each job")
        records.check_unused("hydra.sweep.subdir", folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError("hydra.sweep.subdir", folder, f"cannot write there ({error.strerror})") from error
    return jobs


def races_of(jobs: Sequence[Job]) -> list[list[Job]]:
    """Returns the jobs by race: those of one race differ only in ``HOW``."""
    races: dict[str, list[Job]] = {}
    for job in jobs:
        config = job.record_at_start["config"]
        races.setdefault(repr({key: value for key, value in config.items() if key not in HOW}), []).append(job)
    return list(races.values())


def _job(hydra: HydraContext, sweep: DictConfig, number: int, overrides: list[str]) -> Job:
    config = hydra.config_loader.load_sweep_config(sweep, overrides)
    with open_dict(config):
        config.hydra.job.id = number
        config.hydra.job.num = number
    with _as_hydra_config(config):
        name = str(config.hydra.sweep.subdir)
        folder = Path(str(config.hydra.sweep.dir)) / name
        own = _without_hydra(config)
        record = record_at_start(own)
        try:
            resolved: Any = OmegaConf.to_container(own, resolve=True)
        except OmegaConfBaseException:
            resolved = record["config"]
        return Job(config, overrides, name, folder, record, resolved)


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


@contextmanager
def _as_hydra_config(config: DictConfig) -> Iterator[None]:
    """Sets the global that resolvers like ``hydra:runtime.choices`` read, as Hydra's ``run_job`` does."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before
