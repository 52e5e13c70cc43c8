"""The sections of an entrant's plan. Nothing here imports torch, so that a launcher checks them before a race begins.

Their fields are the keys of ``conf/config.yaml``. A knob is named, explained and checked in its section; its default
stands in the YAML.
"""

from dataclasses import dataclass
from pathlib import Path

from mpcompare.errors import check_every, check_flag, check_number, check_whole


@dataclass(frozen=True)
class Training:
    """Section ``train``."""

    steps: int  # number of training steps after the warm-up
    warmup_steps: int  # number of training steps of the warm-up, which are marked in the records
    deterministic: bool  # whether only algorithms that give the same bits every time are allowed
    # a checkpoint is saved after each step whose number is a multiple of this; None: no checkpoint is saved
    checkpoint_every: int | None
    # whether data that hold NaN, inf or numbers beyond fp32's squares are trained on, without a verdict
    not_finite: bool = False

    def __post_init__(self) -> None:
        check_whole("train.steps", self.steps, at_least=1)
        check_whole("train.warmup_steps", self.warmup_steps, at_least=0)
        check_flag("train.deterministic", self.deterministic)
        check_flag("train.not_finite", self.not_finite)
        check_every("train.checkpoint_every", self.checkpoint_every)

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
    goes_on: bool = False  # whether the folder is this run's own, which was begun in a sweep that was killed

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
    # clock stands still; None: no step is monitored
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
