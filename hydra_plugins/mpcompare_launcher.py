"""``hydra/launcher=side_by_side``. Hydra takes launchers from the ``hydra_plugins`` namespace only; the work is done in
``mpcompare.command.launcher``, which other Hydra programs in the same environment need not import."""

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SideBySide(Launcher):
    """A launcher that runs each job in a process of its own; jobs that are compared with each other take turns."""

    def __init__(self, silence_limit_s: float) -> None:
        """Takes an entrant for hung that gives no sign of life for ``silence_limit_s`` seconds."""
        self.silence_limit_s = silence_limit_s

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from mpcompare.command.launcher import launch

        return launch(self.hydra, self.task, self.config, job_overrides, initial_job_idx, self.silence_limit_s)
