"""Real bugs of schedules."""

from planted.real.registry import Theme
from planted.real.settings import MLP_COSINE, MLP_COSINE_ACCUMULATE, MLP_COSINE_SKIPS
from torch import Tensor

from mpcompare.backends.real_bugs import OwnScheduler, SchedulerCountsMicroBatches, SchedulerMovesOnSkip

SCHEDULE = Theme("schedule")

SCHEDULE.plants(
    "Lightning-AI/pytorch-lightning/issues/18828",
    MLP_COSINE_SKIPS,
    "fp16",
    fair="schedule",
    name="Lightning#18828",
    also="Lightning#16228, Lightning#5558",
)(SchedulerMovesOnSkip)
SCHEDULE.plants(
    "huggingface/accelerate/issues/963",
    MLP_COSINE_ACCUMULATE,
    "bf16",
    fair="schedule",
    also="starVLA#210, ludwig#3555, SpecForge#364",
)(SchedulerCountsMicroBatches)


@SCHEDULE.plants("Lightning-AI/pytorch-lightning/issues/101", MLP_COSINE, "bf16", fair="schedule", name="Lightning#101")
class SchedulerMovesFirst(OwnScheduler):
    """The scheduler moves before the optimizer's step, so the first learning rate is never used."""

    def step(self, lr: float | Tensor) -> None:
        self.count += 1
        super().step(lr)

    def advance(self) -> None:
        self.count -= self.skipped
