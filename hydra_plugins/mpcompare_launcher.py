"""The launchers of mpcompare: ``hydra/launcher=side_by_side``, ``slurm``, and the launcher of ``mpcompare plan``.

Hydra looks for launchers in the namespace package ``hydra_plugins`` only. The work is done in ``mpcompare.command``,
which other Hydra programs in the same environment need not import.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SideBySide(Launcher):
    """A launcher that runs every job in a process of its own. Jobs that differ only in how they compute take turns.

    Args:
        silence_limit_s: seconds without a sign of life after which an entrant is taken for hung.
    """

    def __init__(self, silence_limit_s: float) -> None:
        pass  # each job's configuration has it

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps Hydra's context and the configuration (``Launcher.setup``)."""
        self.hydra, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs of a sweep (``Launcher.launch``)."""
        from mpcompare.command.launcher import launch

        return launch(self.hydra, self.config, job_overrides, initial_job_idx, self.engine())

    def engine(self) -> Any:
        """Returns what runs the races."""
        from mpcompare.command.launcher import run_races

        return run_races


class Plan(SideBySide):
    """A launcher that runs nothing: it leaves each race as a file.

    Args:
        array: the path of a script for ``sbatch``, which is written too; None: no script.
    """

    def __init__(self, silence_limit_s: float, array: str | None) -> None:
        self.array = array

    def engine(self) -> Any:
        from functools import partial

        from mpcompare.command.racing import tell

        return partial(tell, array=self.array)


class Slurm(SideBySide):
    """A launcher that submits every race to SLURM, or to processes of this machine, with submitit. Its arguments are
    explained in :class:`mpcompare.command.submitted.Submitted`."""

    def __init__(self, silence_limit_s: float, executor: str, at_once: int, parameters: Mapping[str, Any]) -> None:
        self.asked = executor, at_once, parameters

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Asks whether SLURM can be reached, before anything is planned."""
        from mpcompare.command.submitted import Submitted  # here, for Hydra wraps what a constructor raises

        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.submitted = Submitted(*self.asked)

    def engine(self) -> Any:
        return self.submitted
