"""What one entrant is to do, as plain values: nothing below knows Hydra."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpcompare.checkpoints import CHECKPOINTS
from mpcompare.contract import Backend, options_of
from mpcompare.errors import InputError, check_every, check_flag, check_number, check_whole
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.task import Task


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        backend: the name under which it was chosen.
        make_backend: the backend's class.
        options: keyword arguments of its own.
        load_data: ``seed -> Dataset``, or the four tensors of one.
        loss_scale: a policy, or a function from the resolved precision to one.
        precision, device: as asked for, ``auto`` included.
        steps, warmup_steps: training steps, and how many before them are marked as warm-up.
        deterministic: only algorithms that give the same bits every time.
        block_s: seconds that a timed block of steps takes, about.
        examine: whether what it computes is examined after training.
        noise: how many more runs of a baseline measure the noise then.
        is_baseline: whether others are compared with this backend.
        eval_every: evaluated on held-out samples after each so many steps; None: only after training.
        monitor_every: each so many training steps are looked into; None: none.
        inference: whether what was trained is run in each precision in the end.
        inference_s: seconds of timed batches then.
        inference_batch: rows of such a batch; None: as many as forward sees in training.
        checkpoint_every: a checkpoint is saved after each step whose number is a multiple of this; None: none is.
        checkpoints: the folder for them.
        resume: a checkpoint, a folder of them, or a run's, from which training continues; None: from its beginning.
        resume_older: whether an older checkpoint there will do if the newest is damaged.
        task_config: the task as it was configured, plain values: a run resumes only from one of the same.
    """

    backend: str
    make_backend: type[Backend]
    options: Mapping[str, Any]
    task: Task
    load_data: Callable[[int], Any]
    loss_scale: LossScale | Callable[[str], LossScale]
    precision: str
    device: str
    seed: int
    steps: int
    warmup_steps: int
    deterministic: bool
    block_s: float
    examine: bool
    noise: int
    is_baseline: bool
    eval_every: int | None = None
    monitor_every: int | None = None
    inference: bool = False
    inference_s: float = 1.0
    inference_batch: int | None = None
    checkpoint_every: int | None = None
    checkpoints: Path = Path(CHECKPOINTS)
    resume: Path | None = None
    resume_older: bool = False
    task_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of the last training step."""
        return self.warmup_steps + self.steps

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, at_least=0, at_most=2**32 - 1)  # the generator takes 32 bits
        check_whole("train.steps", self.steps, at_least=1)
        check_whole("train.warmup_steps", self.warmup_steps, at_least=0)
        if self.checkpoint_every is not None:
            check_whole("train.checkpoint_every", self.checkpoint_every, at_least=1)
        check_flag("resume_older", self.resume_older)
        check_flag("train.deterministic", self.deterministic)
        check_flag("verdict.enabled", self.examine)
        check_whole("verdict.noise", self.noise, at_least=0)
        check_every("eval.every", self.eval_every)
        check_every("monitor.every", self.monitor_every)
        check_flag("inference.enabled", self.inference)
        check_number("inference.budget_s", self.inference_s, above=0)
        check_every("inference.batch_size", self.inference_batch)
        own = options_of(self.make_backend)
        for name, value in self.options.items():
            if name not in own:
                accepted = ", ".join(own) or "no options"
                raise InputError(f"backend.{name}", value, f"backend={self.backend} takes {accepted}")

    def dataset(self) -> Dataset:
        """The data, on the CPU."""
        loaded = self.load_data(self.seed)
        if isinstance(loaded, Dataset):
            return loaded
        function = getattr(self.load_data, "func", self.load_data)
        name = str(getattr(function, "__name__", "function"))
        if not isinstance(loaded, (tuple, list)) or len(loaded) != 4:
            expected = "expected a Dataset, or the tensors x_train, y_train, x_test, y_test"
            raise InputError("data._target_", name, expected)
        return Dataset(name, "asked for", *loaded)
