"""The rule by which an optimizer should update a parameter, from the class and the settings of the optimizer itself."""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcompare.errors import InputError
from mpcompare.tasks.any_optimizer import OwnReplay, fault_of
from mpcompare.tasks.optimizers import OF_TORCH, Adam, AdamW, Coarse, Optimizer, Sgd, UpdateReplay
from mpcompare.verdict.examine.numerics import norm_of
from mpcompare.verdict.examine.seen import Remembered, Seen
from mpcompare.watching.alone import Original
from mpcompare.watching.steps import Taken

# A name that says that an optimizer is Adam, AdamW or SGD, such as DeepSpeedCPUAdam. SignSGD, NAdam, AdamP, AdamMini
# and SGDScheduleFree say more.
PREFIXES = "Fused|Deep|Speed|CPU|Paged|Hybrid|Distributed|Own|My|Custom|Torch"
BY_NAME = re.compile(rf"_*(?:{PREFIXES})*(?:SGD|AdamW?)(?:_?(?:\d+bit|Fp8|Legacy|Optimizer|Fused|CPU))*\d*(?:Of\w+)?")
COARSE = {"bf16": 2.0**16, "fp16": 2.0**13}  # unit roundoffs over fp32's


@dataclass(frozen=True)
class Rule:
    """A rule of one group of parameters."""

    name: str  # the name of the optimizer
    known: Optimizer | None  # our own class of it, whose known mistakes have names; None for any other optimizer
    make: Any = None  # makes the optimizer of one parameter, where ``known`` is None
    kinds: Mapping[str, int] | None = None  # the number of dimensions of each tensor that the optimizer remembers

    def replay(self, dtype: str, moments: Collection[str]) -> UpdateReplay:
        """Returns a new replay of a parameter that is kept in ``dtype``, and remembered in the dtypes ``moments``."""
        coarse = Coarse(COARSE.get(dtype, 1.0), max(COARSE.get(each, 0.0) for each in (dtype, *moments)))
        if self.known is not None:
            return self.known.replay(coarse)
        return OwnReplay(self.make, self.kinds or {}, coarse)


def rules_of(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], state: Mapping[str, Any], own: Original | None = None
) -> list[Rule]:
    """Returns the rules that an optimizer may follow, the likeliest first; its own code is the last one.

    Args:
        settings: the settings of the parameter's group.
        state: what the optimizer remembers of the parameter.
        own: the optimizer as it was when the look began; None: as it is.
    """
    name, found = type(optimizer).__name__, []
    odd = any(settings.get(key) for key in ("amsgrad", "maximize", "dampening"))
    exact = OF_TORCH.get(type(optimizer))
    kinds: list[Any] = [AdamW if settings.get("decoupled_weight_decay") else exact] if exact else []
    if not exact and not is_torchs(optimizer):
        adams = [AdamW, Adam] if settings.get("weight_decay") else [AdamW]
        kinds = adams if "betas" in settings and "eps" in settings else [Sgd]
    for kind in kinds if not odd else []:
        given = {field.name: settings.get(field.name) for field in fields(kind)}
        taken = {key: _numbers(value) for key, value in given.items() if value is not None}
        with suppress(InputError):  # values of another rule, such as three betas
            known = kind(**{"weight_decay": 0.0, **taken, "lr": 1.0})
            if set(state) <= set(known.initial_state(torch.zeros(()))):
                found.append(Rule(kind.of_torch.__name__, known))
    if found and exact:
        return found
    kinds_of = {kind: v.dim() if isinstance(v, Tensor) else -1 for kind, v in state.items()}
    make = partial((own or Original.of(optimizer)).alone, settings={**settings, "lr": 1e-3}, kinds=kinds_of)
    if not fault_of(make, 1e-3):
        found.append(Rule(name, None, make, kinds_of))
    return found


def _numbers(setting: Any) -> Any:
    """Returns a setting with numbers in the place of tensors of one number, which torch takes, too."""
    if isinstance(setting, (list, tuple)):
        return tuple(map(_numbers, setting))
    return setting.item() if isinstance(setting, Tensor) else setting


# Settings of Adam, AdamW and SGD in torch, apex and DeepSpeed. An optimizer with any other may have another rule.
KNOWN = {
    "amsgrad", "maximize", "nesterov", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay",
    "bias_correction", "adam_w_mode", "dampening", "betas",
}  # fmt: skip


def is_by_name(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> bool:
    """Returns whether an optimizer is one of torch's that we know. If it is not, the name of its class must say that it
    is Adam, AdamW or SGD, and its settings must say no more."""
    if isinstance(optimizer, tuple(OF_TORCH)):
        return True
    others = [key for key, value in settings.items() if value is True and key not in KNOWN]
    return bool(BY_NAME.fullmatch(type(optimizer).__name__)) and not others


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the class of an optimizer is one of torch's."""
    return type(optimizer).__module__.startswith("torch.optim")


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is an AdamW, whose decay is no part of the gradient, or is called so."""
    words = re.findall("[A-Z][a-z]*", type(optimizer).__name__)
    return isinstance(optimizer, AdamW.of_torch) or {"Adam", "W"} <= set(words)


def update_of(step: Taken, names: Sequence[str], steps: int = 0) -> Seen:
    """Returns the update of some parameters of one group, in the examination's terms.

    Args:
        steps: how many steps of the optimizer were seen before.
    """
    before, after, given = ({n: side[n] for n in names} for side in (step.before, step.after, step.given))
    raw = {n: step.raw.get(n, g) for n, g in given.items()}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in names:
        for kind, value in step.state[name].items():
            if kind != "step":
                number = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
                tensors.setdefault(kind, {})[name] = number
    counts = [step.state[n].get("step", step.settings[n].get("step", 0)) for n in names]
    count = max(int(c) if isinstance(c, (int, float, Tensor)) else 0 for c in counts)
    lr, known = float(step.settings[names[0]]["lr"]), Remembered(tensors, count)
    norm, scale = norm_of(given), step.scale
    return Seen(before, after, given, lr, known, grads=raw, scale=scale, number=count, steps=steps, clipped_norm=norm)
