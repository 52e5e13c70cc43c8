"""The jobs of a sweep, and the races that they form: plain values, of which a file can be made."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

from mpcompare import records
from mpcompare.command.record import record_at_start
from mpcompare.errors import InputError

# The jobs of one race may differ in these: in how they compute, never in what.
HOW = ("backend", "precision", "engine", "loss_scale")


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    sweep: Path  # the folder of the sweep
    name: str  # its own folder below the sweep's
    # the first entries of its ``result.json``. Their ``config`` is resolved. Where it cannot be resolved it is as it
    # was written, and the job fails.
    record_at_start: dict[str, Any]
    hydra: dict[str, Any]  # Hydra's own node, as it was written

    @property
    def folder(self) -> Path:
        """The folder of its record."""
        return self.sweep / self.name

    @cached_property
    def config(self) -> DictConfig:
        """The configuration, with Hydra's own node."""
        with flag_override(of_hydra := OmegaConf.structured(HydraConf), "struct", False):
            # Merged in one go: OmegaConf resolves what a second value replaces, and ${free:...} makes a folder.
            own = {**self.hydra, "sweep": {"dir": str(self.sweep), "subdir": self.name}}
            of_hydra = OmegaConf.merge(of_hydra, own)
        config = OmegaConf.create({**self.record_at_start["config"], "hydra": of_hydra})
        OmegaConf.set_struct(config, True)
        return config

    @property
    def silence_limit_s(self) -> float:
        """The seconds without a sign of life after which it is taken for hung."""
        return self.hydra["launcher"]["silence_limit_s"]

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line that make this job."""
        return list(self.hydra["overrides"]["task"])

    def ended(self) -> JobReturn:
        """Returns the job for Hydra's sweeper. A job that failed is a row of the report, not an exception that ends the
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


def races_of(hydra: HydraContext, sweep: DictConfig, overrides: Sequence[Sequence[str]], first: int) -> list[list[Job]]:
    """Returns the jobs with these overrides, numbered from ``first`` on, by race: the jobs of one race differ only in
    ``HOW``. Makes their folders. Raises InputError where two share a folder, or a folder cannot be written or holds a
    run already."""
    races: dict[str, list[Job]] = {}
    for number, each in enumerate(overrides, first):
        race, job = _job(hydra, sweep, number, list(each))
        races.setdefault(race, []).append(job)
    for folder in (folders := [job.folder for race in races.values() for job in race]):
        if folders.count(folder) > 1:
            raise InputError("hydra.sweep.subdir", folder.name, "expected a folder of its own for each job")
        records.check_unused("hydra.sweep.subdir", folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError("hydra.sweep.subdir", folder, f"cannot write there ({error.strerror})") from error
    return list(races.values())


def _job(hydra: HydraContext, sweep: DictConfig, number: int, overrides: list[str]) -> tuple[str, Job]:
    """Returns a job, and a word that all jobs of its race share."""
    config = hydra.config_loader.load_sweep_config(sweep, overrides)
    with open_dict(config):
        config.hydra.job.id = number
        config.hydra.job.num = number
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)  # resolvers like hydra:runtime.choices read it
    try:
        name = str(config.hydra.sweep.subdir)
        folder = Path(str(config.hydra.sweep.dir))
        record = record_at_start(own := _without_hydra(config))
        race = repr({key: value for key, value in record["config"].items() if key not in HOW})
        with suppress(OmegaConfBaseException):
            record["config"] = OmegaConf.to_container(own, resolve=True)
        of_hydra: Any = OmegaConf.to_container(config.hydra, enum_to_str=True)
        return race, Job(folder, name, record, of_hydra)
    finally:
        HydraConfig.instance().cfg = before


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
