"""Real bugs of the second draw: checkpoints and schedules."""

from planted.real.registry import Theme
from planted.real.second_draw_settings import MLP_WARMUP_COSINE
from planted.real.settings import MLP_ADAM, MLP_COSINE
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.real_bugs import OwnScheduler
from mpcompare.contract import State

RESUME, SCHEDULE = Theme("resume", draw=2), Theme("schedule", draw=2)


class CountsUpdates(OwnScheduler):
    """A scheduler that moves after each update, which is right."""

    def advance(self) -> None:
        self.count += 0 if self.skipped else 1


@RESUME.plants("THUDM/slime/pull/1547", MLP_COSINE, "bf16", fair="resume, schedule", also="miles#1627")
class MovesTheLoadedScheduler(CountsUpdates):
    """The scheduler is loaded, and then moved by as many steps as the run had taken: twice as far."""

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.count *= 2


@RESUME.plants(
    "Lightning-AI/pytorch-lightning/issues/1772", MLP_COSINE, "bf16", fair="resume, schedule", name="Lightning#1772"
)
class SavedBeforeTheScheduler(CountsUpdates):
    """The checkpoint is written before the scheduler moves, so a run that is resumed is one step behind."""

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "loss_scale": {**state["loss_scale"], "scheduler": max(self.count - 1, 0)}}


@RESUME.plants("OpenNMT/OpenNMT-py/issues/617", MLP_ADAM, "bf16", fair="resume", also="OpenNMT-py#38, TrenTorch#187")
class OptimizerMadeAfterLoading(Amp):
    """The optimizer is made anew after its state was loaded, so moments and counts begin at 0."""

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({**state, "optimizer": {}})


@SCHEDULE.plants("facebookresearch/ParlAI/pull/4384", MLP_WARMUP_COSINE, "bf16", fair="schedule")
class WarmsUpForever(CountsUpdates):
    """A run counts as warming up while its rate is below 1, so that it never decays."""

    def step(self, lr: float | Tensor) -> None:
        count, self.count = self.count, min(self.count, 3)
        super().step(lr)
        self.count = count + (0 if self.skipped else 1)
