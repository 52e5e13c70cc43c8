"""Real bugs of the third draw: checkpoints and schedules."""

import math

import torch
from planted.real.registry import Theme
from planted.real.second_draw_resume import CountsUpdates
from planted.real.second_draw_settings import BATCH_NORM_BF16
from planted.real.settings import GPT_ADAMW
from planted.real.third_draw_settings import MLP_ADAMW_WARMUP, MLP_NESTEROV
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.schedules import Cosine
from mpcompare.tasks.task import Params, Task

RESUME, SCHEDULE = Theme("resume", draw=3), Theme("schedule", draw=3)


@RESUME.plants("torch/nn/issues/1165", BATCH_NORM_BF16, "bf16", fair="resume, running statistics, buffers")
class StatisticsNotSaved(Amp):
    """The checkpoint holds the parameters alone, so running statistics begin anew."""

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.initial = {name: b.clone() for name, b in self.buffers().items()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({**state, "buffers": self.initial})


@RESUME.plants(
    "Megvii-BaseDetection/YOLOX/issues/1318",
    MLP_NESTEROV,
    "fp16",
    fair="resume",
    also="schnetpack#785, ultralytics#9426, yolov5#310, Latte#55",
)
class AverageSavedForTheWeights(Amp):
    """The checkpoint holds a moving average of the weights, and a run that is resumed goes on with it."""

    updates = 0

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        super().__init__(model, task, precision, loss_scale)
        self.average: Params = {name: p.clone() for name, p in self.master_params().items()}

    def update(self) -> None:
        super().update()
        self.updates += 1
        decay = 0.9998 * (1 - math.exp(-self.updates / 2000))
        for name, p in self.master_params().items():
            self.average[name].mul_(decay).add_(p, alpha=1 - decay)

    def state_dict(self) -> State:
        return {**super().state_dict(), "params": self.average}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.average = {name: p.clone() for name, p in self.master_params().items()}


@RESUME.plants("pytorch/pytorch/pull/6031", GPT_ADAMW, "bf16", fair="resume, moments, optimizer")
class ParametersInASet(Amp):
    """The optimizer is given a set of parameters, which has another order after loading: tensors get what was
    remembered of others. Here each gets that of the next one of its shape."""

    def load_state_dict(self, state: State) -> None:
        same: dict[torch.Size, list[str]] = {}
        for name, p in state["params"].items():
            same.setdefault(p.shape, []).append(name)
        following = {name: names[(i + 1) % len(names)] for names in same.values() for i, name in enumerate(names)}
        mixed = {kind: {name: named[following[name]] for name in named} for kind, named in state["optimizer"].items()}
        super().load_state_dict({**state, "optimizer": mixed})


@SCHEDULE.plants(
    "meta-pytorch/torchtune/issues/2010",
    MLP_ADAMW_WARMUP,
    "bf16",
    fair="schedule",
    also="verl#3674, bert#1293, DeepSpeed#5287",
)
class WarmsUpFromZero(CountsUpdates):
    """The warm-up begins with a learning rate of 0, so the first batch teaches nothing, and is one update behind."""

    def step(self, lr: float | Tensor) -> None:
        schedule = self.task.schedule
        assert isinstance(schedule, Cosine)
        warming = self.count < schedule.warmup_steps
        factor = self.count / schedule.warmup_steps if warming else schedule.factor(self.count)
        Amp.step(self, self.task.optimizer.lr * factor)
        self.advance()
