"""A copy of an optimizer of the loop with one parameter, in which its own code makes an update once more.

The constructor is not called: it may have arguments that nobody knows. What the optimizer has besides its groups and
its state is copied where it is plain. Everything else, such as a model, is left out: the copy must change nothing of
the loop's. Code that needs it stops with an error, and is not replayed.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpcompare.verdict.examine.widened import Widened

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type)
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
OWN = {"param_groups", "state", "step", *HOOKS}  # a scheduler may have put another step on
AS_PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


def is_plain(value: Any) -> bool:
    """Returns whether a value is made of numbers and words, so that a copy of it shares nothing. A function may hold
    something of the loop's, such as a counter."""
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
    attributes: Mapping[str, Any]  # what is plain of all that it has besides its groups and its state
    state: Mapping[str, float | int]  # by kind a number of what it remembered of a parameter; empty if nothing

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Original":
        attributes = copied({key: value for key, value in vars(optimizer).items() if key not in OWN})
        states = (s for p, s in optimizer.state.items() if isinstance(p, Tensor) and isinstance(s, Mapping) and len(s))
        first: Mapping[str, Any] = next(states, {})
        return cls(type(optimizer), attributes, {kind: _mean(v) for kind, v in first.items() if _is_number(v)})

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


def left_out(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the attributes of an optimizer that no copy has, such as masters that its first step made."""
    slots = {name: getattr(optimizer, name, None) for each in type(optimizer).__mro__ for name in _slots(each)}
    return [key for key, value in {**slots, **vars(optimizer)}.items() if key not in OWN and not is_plain(value)]


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if not name.startswith("__")]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        type(value) is Tensor and value.device.type != "meta" and bool(value.numel())
    )


def _mean(value: Any) -> float | int:
    """Returns the mean of the first numbers of what an optimizer remembers."""
    return value.detach().flatten()[:64].double().mean().item() if isinstance(value, Tensor) else value


def _like(p: Tensor, value: float, dims: int) -> Any:
    if dims < 0:
        return value
    return torch.full_like(p.detach(), value) if dims else torch.tensor(float(value))
