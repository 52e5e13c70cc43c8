"""Real bugs of checkpoints."""

import torch
from planted.real.registry import Theme
from planted.real.settings import MLP, MLP_ADAMW
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.real_bugs import ScalerNotSaved
from mpcompare.contract import State
from mpcompare.tasks.task import Params

RESUME = Theme("resume")

RESUME.plants(
    "ultralytics/ultralytics/pull/22189",
    MLP_ADAMW,
    "fp16",
    fair="resume",
    also="detectron2#3686, vision#4923, transformers#11663, tango#154, torchtitan#146, co-tracker#101",
)(ScalerNotSaved)


@RESUME.plants("mosaicml/composer/pull/1376", MLP, "fp16", fair="resume")
class ScalerMadeAfterLoading(Amp):
    """The scaler is made after the checkpoint was loaded, so the state that was saved is lost."""

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({**state, "loss_scale": {}})


@RESUME.plants("facebookresearch/metaseq/issues/3", MLP, "fp16", fair="resume")
class TrackerNotSaved(MasterWeights):
    """The checkpoint holds the loss scale, but not since when it has not overflowed."""

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "loss_scale": {**state["loss_scale"], "growth_tracker": 0}}


@RESUME.plants("huggingface/accelerate/issues/4289", MLP_ADAMW, "fp16", fair="resume")
class StepWhileLoading(Amp):
    """Loading the optimizer takes an empty step, which updates the scaler that was restored just before."""

    def load_state_dict(self, state: State) -> None:
        scale, tracker = state["loss_scale"]["scale"], state["loss_scale"]["growth_tracker"] + 1
        if tracker == self.scaler.get_growth_interval():
            scale, tracker = scale * self.scaler.get_growth_factor(), 0
        super().load_state_dict({**state, "loss_scale": {"scale": scale, "growth_tracker": tracker}})


def rounded(optimizer: dict[str, Params], dtype: torch.dtype, *kinds: str) -> dict[str, Params]:
    """Returns the optimizer's state with these kinds of tensors, or all, rounded to ``dtype``."""
    return {
        kind: {name: t.to(dtype).float() if kind in kinds or not kinds else t for name, t in tensors.items()}
        for kind, tensors in optimizer.items()
    }


@RESUME.plants("ultralytics/ultralytics/pull/9453", MLP_ADAMW, "fp16", fair="resume")
class OptimizerSavedInFp16(Amp):
    """The checkpoint holds the optimizer's state in fp16, with its count of updates."""

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "optimizer": rounded(state["optimizer"], torch.float16)}


@RESUME.plants(
    "pytorch/pytorch/issues/43706", MLP_ADAMW, "fp16", fair="resume", also="fairscale#50, OpenTau#184, speculators#899"
)
class MomentsCastToTheWeights(Amp):
    """Optimizer.load_state_dict casts moments in fp32 to the dtype of the weights, which is fp16."""

    def load_state_dict(self, state: State) -> None:
        optimizer = rounded(state["optimizer"], self.compute_dtype, "exp_avg", "exp_avg_sq")
        super().load_state_dict({**state, "optimizer": optimizer})


@RESUME.plants("TensorAuto/OpenTau/issues/185", MLP_ADAMW, "bf16", fair="resume")
class MastersFromTheCopies(MasterWeights):
    """The masters are not saved, but made anew from the bf16 weights."""

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "params": {name: p.to(self.compute_dtype).float() for name, p in state["params"].items()}}


@RESUME.plants("NVIDIA/apex/pull/42", MLP, "fp16", fair="resume")
class MastersMadeBeforeLoading(MasterWeights):
    """The masters are copied from the network before the checkpoint is loaded into it, and keep the old values."""

    def load_state_dict(self, state: State) -> None:
        kept = {name: master.detach().clone() for name, master in self.masters.items()}
        super().load_state_dict(state)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(kept[name])


@RESUME.plants("NVIDIA/Model-Optimizer/pull/2322", MLP_ADAMW, "bf16", fair="resume, no master weights, timed steps")
class NoMastersAfterLoading(MasterWeights):
    """A run that is resumed has no masters any more: the flag for them is lost, and the weights are bf16."""

    without = False

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.without = True
        self.round()

    def step(self, lr: float | Tensor) -> None:
        super().step(lr)
        if self.without:
            self.round()

    def round(self) -> None:
        with torch.no_grad():
            for master in self.masters.values():
                master.copy_(master.to(self.compute_dtype))
