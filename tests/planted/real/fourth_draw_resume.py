"""Real bugs of the fourth draw: checkpoints and schedules."""

import math

from planted.real.registry import Theme
from planted.real.second_draw_resume import CountsUpdates
from planted.real.settings import GPT_ADAMW
from planted.real.third_draw_settings import MLP_ADAMW_WARMUP
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.contract import State
from mpcompare.tasks.schedules import Cosine

RESUME, SCHEDULE = Theme("resume", draw=4), Theme("schedule", draw=4)


@RESUME.plants("NVIDIA-NeMo/Automodel/pull/2511", GPT_ADAMW, "bf16", fair="resume", name="Automodel#2511")
class HeadFromTheEmbedding(Amp):
    """The last layer counts as tied to the embedding and is left out of the checkpoint. It is not tied, and a run that
    is resumed has the embedding's weights in its place."""

    def load_state_dict(self, state: State) -> None:
        params = state["params"]
        super().load_state_dict({**state, "params": {**params, "output.weight": params["embedding.weight"]}})


@RESUME.plants(
    "PolymathicAI/the_well/pull/63",
    MLP_ADAMW_WARMUP,
    "bf16",
    fair="resume, schedule",
    also="InnerEye-DeepLearning#311",
)
class SchedulerNotSaved(CountsUpdates):
    """The checkpoint holds the optimizer, but not the scheduler: warm-up and cosine begin anew."""

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.count = 0


@SCHEDULE.plants("deepseek-ai/DeepSpec/issues/32", MLP_ADAMW_WARMUP, "bf16", fair="schedule")
class OvershootsThePeak(CountsUpdates):
    """After the warm-up the cosine takes its recursive step from the peak, and so exceeds it by the factor
    ``2 / (1 + cos(pi / steps))``; its later rates are multiples of that one."""

    def step(self, lr: float | Tensor) -> None:
        schedule = self.task.schedule
        assert isinstance(schedule, Cosine)
        assert schedule.steps is not None
        factor = schedule.factor(self.count)
        if self.count >= schedule.warmup_steps:
            factor *= 2 / (1 + math.cos(math.pi / (schedule.steps - schedule.warmup_steps)))
        Amp.step(self, self.task.optimizer.lr * factor)
        self.advance()
