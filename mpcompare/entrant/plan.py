"""The plan of one entrant as plain values: nothing below knows Hydra.

Its sections are those of ``conf/config.yaml``, and their fields are the keys there. A knob is named, explained and
checked in its section; its default stands in the YAML.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpcompare.contract import Backend, options_of
from mpcompare.errors import InputError, check_every, check_flag, check_number, check_whole, fault_of_call
from mpcompare.loss_scale import LossScale
from mpcompare.race.turns import Rules
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.given import called, dataset_of
from mpcompare.tasks.task import Task


@dataclass(frozen=True)
class Training:
    """Section ``train``."""

    steps: int  # number of training steps after the warm-up
    warmup_steps: int  # number of training steps before them, which are marked in the records
    deterministic: bool  # whether only algorithms that give the same bits every time are allowed
    # a checkpoint is saved after each step whose number is a multiple of this; None: none is
    checkpoint_every: int | None
    # whether data that hold NaN, inf or numbers beyond fp32's squares are trained on, without a verdict
    not_finite: bool = False

    def __post_init__(self) -> None:
        check_whole("train.steps", self.steps, at_least=1)
        check_whole("train.warmup_steps", self.warmup_steps, at_least=0)
        check_flag("train.deterministic", self.deterministic)
        check_flag("train.not_finite", self.not_finite)
        if self.checkpoint_every is not None:
            check_whole("train.checkpoint_every", self.checkpoint_every, at_least=1)

    @property
    def last_step(self) -> int:
        """The number of the last training step; the first is 1."""
        return self.warmup_steps + self.steps


@dataclass(frozen=True)
class Resumption:
    """Keys ``resume`` and ``resume_older``."""

    # a checkpoint, a folder of checkpoints or a run's folder, from which training continues; None: training begins with
    # the initial weights
    folder: Path | None
    older: bool  # whether an older checkpoint there will do if the newest is damaged
    goes_on: bool = False  # whether the folder is that of this run itself, which was begun in a sweep that was killed

    def __post_init__(self) -> None:
        check_flag("resume_older", self.older)


@dataclass(frozen=True)
class Evaluation:
    """Section ``eval``."""

    # loss and accuracy on held-out samples are computed after each step whose number is a multiple of this; None: only
    # after training
    every: int | None

    def __post_init__(self) -> None:
        check_every("eval.every", self.every)


@dataclass(frozen=True)
class Monitoring:
    """Section ``monitor``."""

    # each step whose number is a multiple of this is monitored: its gradients and updates are looked at, while the
    # clock stands still; None: no step is
    every: int | None

    def __post_init__(self) -> None:
        check_every("monitor.every", self.every)


@dataclass(frozen=True)
class Inference:
    """Section ``inference``."""

    enabled: bool  # whether the trained network is called in each precision in the end
    budget_s: float  # seconds of timed batches, all precisions together
    batch_size: int | None  # rows of such a batch; None: as many as forward sees in training

    def __post_init__(self) -> None:
        check_flag("inference.enabled", self.enabled)
        check_number("inference.budget_s", self.budget_s, above=0)
        check_every("inference.batch_size", self.batch_size)


@dataclass(frozen=True)
class Examination:
    """Section ``verdict``."""

    enabled: bool  # whether the backend is examined after training
    noise: int  # number of runs in which a baseline trains again, to measure the noise

    def __post_init__(self) -> None:
        check_flag("verdict.enabled", self.enabled)
        check_whole("verdict.noise", self.noise, at_least=0)


@dataclass(frozen=True)
class Plan:
    """One run."""

    backend: str  # the name under which the backend was chosen
    make_backend: type[Backend]  # the backend's class
    options: Mapping[str, Any]  # keyword arguments of this backend's own
    is_baseline: bool  # whether others are compared with this backend
    task: Task  # the task as it is trained
    # the task as it was configured, plain values: a run resumes only from one of the same
    task_config: Mapping[str, Any]
    load_data: Callable[[int], Any]  # ``seed -> Dataset``, or the four tensors of one
    # the loss scale as training begins, or a function of the resolved precision that returns it
    loss_scale: LossScale | Callable[[str], LossScale]
    # precision, device: as asked for, ``auto`` included
    precision: str
    device: str
    seed: int  # of the initial weights and of generated data
    train: Training
    resume: Resumption
    eval: Evaluation
    monitor: Monitoring
    measure: Rules  # ``block_s`` of these rules holds for an entrant, the others for its race
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
        """Returns the data, on the CPU.

        Raises:
            InputError: the configured function does not take the seed alone, raises, or returns something else.
        """
        function = getattr(self.load_data, "func", self.load_data)
        name = str(getattr(function, "__name__", "function"))
        if (fault := fault_of_call(self.load_data, self.seed)) is not None:
            raise InputError("data._target_", name, f"expected a function that can be called with the seed ({fault})")
        return dataset_of(called(self.load_data, self.seed, name), name)
