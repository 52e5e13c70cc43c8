"""The plan of one entrant as plain values: nothing below knows Hydra."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpcompare.contract import Backend, options_of
from mpcompare.entrant.sections import Evaluation, Examination, Inference, Monitoring, Resumption, Training
from mpcompare.errors import InputError, check_whole
from mpcompare.loss_scale import LossScale
from mpcompare.race.turns import Rules
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.given import load
from mpcompare.tasks.task import Task


@dataclass(frozen=True)
class Plan:
    """One run."""

    backend: str  # the name under which the backend was chosen
    make_backend: type[Backend]  # the backend's class
    options: Mapping[str, Any]  # keyword arguments of this backend's own
    is_baseline: bool  # whether others are compared with this backend
    task: Task  # the task as it is trained
    # the task as it was configured, plain values: a run resumes only from a run of the same task
    task_config: Mapping[str, Any]
    load_data: Callable[[int], Any]  # ``seed -> Dataset``, or a data set's four tensors
    # the loss scale as training begins, or a function of the resolved precision that returns it
    loss_scale: LossScale | Callable[[str], LossScale]
    # precision, device: as asked for, ``auto`` included
    precision: str
    device: str
    seed: int  # the seed of the initial weights and of generated data
    train: Training
    resume: Resumption
    eval: Evaluation
    monitor: Monitoring
    measure: Rules  # ``block_s`` of these rules holds for an entrant, the other rules for its race
    inference: Inference
    verdict: Examination

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, at_least=0, at_most=2**32 - 1)  # the generator takes 32 bits
        accepted = options_of(self.make_backend)
        for name, value in self.options.items():
            if name not in accepted:
                takes = ", ".join(accepted) or "no options"
                raise InputError(f"backend.{name}", value, f"backend={self.backend} takes {takes}")

    def dataset(self) -> Dataset:
        """Returns the data, on the CPU. Raises InputError where the configured function makes none."""
        return load(self.load_data, self.seed)
