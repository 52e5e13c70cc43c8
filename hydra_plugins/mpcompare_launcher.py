"""The launcher ``hydra/launcher=side_by_side``.

Hydra looks for launchers in the namespace package ``hydra_plugins`` only. The work is done in
``mpcompare.command.launcher``, which other Hydra programs in the same environment need not import.
"""

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SideBySide(Launcher):
    """A launcher that runs every job in a process of its own. Jobs that differ only in how they compute take turns."""

    def __init__(self, silence_limit_s: float) -> None:
        """Makes the launcher.

        Args:
            silence_limit_s: seconds without a sign of life after which an entrant is taken for hung.
        """
        self.silence_limit_s = silence_limit_s

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps Hydra's context, the task function and the configuration (``Launcher.setup``)."""
        self.hydra, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs of a sweep (``Launcher.launch``)."""
        from mpcompare.command.launcher import launch

        return launch(self.hydra, self.task, self.config, job_overrides, initial_job_idx, self.silence_limit_s)
