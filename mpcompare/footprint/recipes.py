"""The recipes: the ways to hold and to train a network whose bytes are compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.peers.bf16_weights import Bf16Weights
from mpcompare.footprint.eight_bit import EightBitMoments, Int8Inference
from mpcompare.loss_scale import NoLossScale
from mpcompare.tasks.task import Task


@dataclass(frozen=True)
class FootprintRecipe:
    """A way to hold and to train a network."""

    name: str  # its name in the table
    meaning: str  # the dtypes that it keeps, in a few words
    make: Callable[[nn.Module, Task], Any]  # returns a backend, with phases or in one piece, on a copy of the module


def _trained(backend: Any, precision: str = "bf16") -> Callable[[nn.Module, Task], Any]:
    return lambda model, task: backend(model, task, precision, NoLossScale())


def _eight_bit_moments(model: nn.Module, task: Task) -> Amp:
    backend = Amp(model, task, "bf16", NoLossScale())
    backend.optimizer = EightBitMoments(backend.model.parameters(), task.optimizer)
    return backend


RECIPES = (
    FootprintRecipe("fp32", "all in fp32", _trained(Fp32, "fp32")),
    FootprintRecipe("amp", "fp32 params, 16-bit casts", _trained(Amp)),
    FootprintRecipe("master_weights", "16-bit network, fp32 masters", _trained(MasterWeights)),
    FootprintRecipe("plain bf16", "params and moments in bf16", _trained(Bf16Weights)),
    FootprintRecipe("8-bit moments", "amp, moments in 8 bits", _eight_bit_moments),
    FootprintRecipe("int8 inference", "int8 weights, forward only", lambda model, task: Int8Inference(model)),
)
