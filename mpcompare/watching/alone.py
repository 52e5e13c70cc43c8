"""A copy of an optimizer of the loop with one parameter, in which its own code makes an update once more.

The constructor is not called: it may have arguments that nobody knows. What the optimizer has besides its groups and
its state is copied where it is plain. Everything else, such as a model, is left out: the copy must change nothing of
the loop's. Code that needs it stops with an error, and is not replayed.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpcompare.verdict.examine.widened import Widened

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type, FunctionType, BuiltinFunctionType)
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
AS_PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


def is_plain(value: Any) -> bool:
    """Returns whether a value is made of numbers, words and functions, so that a copy of it shares nothing."""
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN) or (isinstance(value, Tensor) and value.numel() == 1 and value.is_leaf)


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns copies of the plain ones of some values."""
    return copy.deepcopy({key: value for key, value in values.items() if is_plain(value)})


@dataclass(frozen=True)
class Original:
    """An optimizer as it was when the look began."""

    kind: type[torch.optim.Optimizer]
    attributes: Mapping[str, Any]  # what it has besides its groups and its state
    left_out: list[str]  # those of them that are not plain
    state: Mapping[str, float | int]  # by kind a number of what it remembered of a parameter; empty if nothing

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Original":
        without = {"param_groups", "state", "step", *HOOKS}  # a scheduler may have put another step on
        besides = {key: value for key, value in vars(optimizer).items() if key not in without}
        attributes = copied(besides)
        first: Mapping[str, Any] = next((s for p, s in optimizer.state.items() if isinstance(p, Tensor) and s), {})
        numbers = {k: v for k, v in first.items() if isinstance(v, (Tensor, int, float))}
        mean = {k: v.detach().double().mean().item() if isinstance(v, Tensor) else v for k, v in numbers.items()}
        return cls(type(optimizer), attributes, sorted(besides.keys() - attributes.keys()), mean)

    def alone(self, p: nn.Parameter, settings: Mapping[str, Any], kinds: Mapping[str, int]) -> torch.optim.Optimizer:
        """Returns the optimizer with one parameter.

        Args:
            kinds: the number of dimensions of each tensor that it remembers; -1 for a Python number.
        """
        if hasattr(self.kind, "__del__"):  # the end of the copy might free something of the loop's
            raise TypeError(f"{self.kind.__name__} frees something at its end")
        made = cast(Any, self.kind.__new__(self.kind))
        vars(made).update(copy.deepcopy(self.attributes), **{key: OrderedDict() for key in HOOKS})
        own = copied(settings)
        made.param_groups = [{**own, **{k: v for k, v in AS_PLAIN.items() if k in own}, "params": [p]}]
        made.state = defaultdict(dict)
        if self.state:
            made.state[p] = {kind: _like(p, value, kinds.get(kind, -1)) for kind, value in self.state.items()}
        step = made.step

        def widened() -> None:  # the optimizer may keep masters in fp32
            with Widened(p.dtype):
                step()

        made.step = widened
        return cast(torch.optim.Optimizer, made)


def _like(p: Tensor, value: float, dims: int) -> Any:
    if dims < 0:
        return value
    return torch.full_like(p.detach(), value) if dims else torch.tensor(float(value))
