"""Parameter groups: parameters with a learning rate and a weight decay of their own, as ``torch.optim`` has them.

    groups: [{kind: vectors, weight_decay: 0}, {match: "head.*", lr_factor: 10}]

A parameter belongs to the first group that takes it; a parameter that no group takes has the optimizer's own values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.errors import BackendUnavailable, InputError, check_choice, check_number

KINDS = ("vectors", "biases")
Parameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Group:
    """The parameters that both ``match`` and ``kind`` take, and their values."""

    match: tuple[str, ...] = ("*",)  # patterns of names, as shells have them; one pattern that fits is enough
    # ``vectors``, which have at most one dimension: biases, and the weights of norms; ``biases``, by the last part of
    # their name; None: every kind
    kind: str | None = None
    lr_factor: float = 1.0  # the group's learning rate over the optimizer's, above 0
    weight_decay: float | None = None  # at least 0; None: the optimizer's

    def takes(self, name: str, dims: int) -> bool:
        """Returns whether a parameter of so many dimensions belongs to the group, unless an earlier group takes it."""
        if (self.kind == "vectors" and dims > 1) or (self.kind == "biases" and "bias" not in name.rpartition(".")[2]):
            return False
        return any(fnmatchcase(name, pattern) for pattern in self.match)


def read_groups(groups: object) -> tuple[Group, ...]:
    """Returns the groups of a configuration: a list of nodes with the attributes of :class:`Group`; None: no groups.
    Raises InputError where it is something else, or an attribute has another value."""
    field = "task.optimizer.groups"
    if not isinstance(groups, (list, tuple, type(None))):
        raise InputError(field, groups, "expected a list, as in [{kind: vectors, weight_decay: 0}]")
    return tuple(_read_group(f"{field}[{number}]", group) for number, group in enumerate(groups or ()))


def _read_group(field: str, node: object) -> Group:
    known = [attribute.name for attribute in fields(Group)]
    if isinstance(node, Group):
        node = {name: getattr(node, name) for name in known}
    if not isinstance(node, Mapping):
        raise InputError(field, node, f"expected a node of {', '.join(known)}")
    for key in node:
        check_choice(f"{field}: key", key, known)
    given: dict[str, Any] = dict(node)
    match = given.get("match", "*")
    given["match"] = (match,) if isinstance(match, str) else match
    if not isinstance(given["match"], (list, tuple)) or not all(isinstance(one, str) for one in given["match"]):
        raise InputError(f"{field}.match", match, 'expected a pattern of names, or a list, as in ["head.*"]')
    given["match"] = tuple(given["match"])
    if given.get("kind") is not None:
        check_choice(f"{field}.kind", given["kind"], KINDS)
    check_number(f"{field}.lr_factor", given.get("lr_factor", 1.0), above=0)
    if given.get("weight_decay") is not None:
        check_number(f"{field}.weight_decay", given["weight_decay"], at_least=0)
    return Group(**given)


def check_groups(optimizer: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises InputError where a group takes none of a network's parameters: its pattern is misspelt, say."""
    named = list(named)
    taken = {_number_of(optimizer, name, p.dim()) for name, p in named}
    for number, group in enumerate(_groups_of(optimizer)):
        if number not in taken:
            what = f"{{match: [{', '.join(group.match)}]" + (f", kind: {group.kind}}}" if group.kind else "}")
            names = ", ".join(name for name, _ in named[:3])
            expected = f"takes none of the parameters ({names}, ...) that no group before it takes"
            raise InputError(f"task.optimizer.groups[{number}]", what, expected)


def in_group(optimizer: Any, name: str, dims: int) -> tuple[Any, float]:
    """Returns an optimizer without groups, with the learning rate and weight decay of one parameter; and the factor of
    its learning rate."""
    return (optimizer, 1.0) if not _groups_of(optimizer) else _in_group(optimizer, name, dims)


@lru_cache(maxsize=4096)
def _in_group(optimizer: Any, name: str, dims: int) -> tuple[Any, float]:
    number = _number_of(optimizer, name, dims)
    group = Group() if number is None else optimizer.groups[number]
    decay = optimizer.weight_decay if group.weight_decay is None else group.weight_decay
    factor = group.lr_factor
    return replace(optimizer, lr=factor * optimizer.lr, weight_decay=decay, groups=()), factor


def _number_of(optimizer: Any, name: str, dims: int) -> int | None:
    return next((i for i, group in enumerate(_groups_of(optimizer)) if group.takes(name, dims)), None)


def _groups_of(optimizer: Any) -> tuple[Group, ...]:
    """Returns the groups of an optimizer; an optimizer from elsewhere may have no groups."""
    return getattr(optimizer, "groups", ())


def for_torch(optimizer: Any, params: Parameters) -> list[Any]:
    """Returns the first argument of torch's optimizers: the parameters, or a node for each of their groups. Raises
    InputError where there are groups, and the parameters come without their names."""
    given = list(params)
    if not _groups_of(optimizer):
        return [p[1] if isinstance(p, tuple) else p for p in given]
    nodes: dict[tuple[float, float | None], dict[str, Any]] = {}
    for pair in given:
        if not isinstance(pair, tuple):
            expected = "this backend gives its optimizer parameters without names: expected named_parameters()"
            raise InputError("task.optimizer.groups", len(optimizer.groups), expected)
        own, factor = in_group(optimizer, pair[0], pair[1].dim())
        decay = {} if own.weight_decay is None else {"weight_decay": own.weight_decay}
        node = {"params": [], "lr": own.lr, "lr_factor": factor, **decay}
        nodes.setdefault((factor, own.weight_decay), node)["params"].append(pair[1])
    return list(nodes.values())


def params_in(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the parameters of all groups of an optimizer of torch's, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def by_names(optimizer: Any, named: Iterable[tuple[str, Tensor]]) -> Any:
    """Returns the same optimizer, whose groups list the names of their parameters: nobody needs dimensions then."""
    if not _groups_of(optimizer):
        return optimizer
    names: dict[int | None, list[str]] = {}
    for name, p in named:
        names.setdefault(_number_of(optimizer, name, p.dim()), []).append(escape(name))
    groups = [
        replace(group, match=tuple(names.get(number, ())), kind=None) for number, group in enumerate(optimizer.groups)
    ]
    return replace(optimizer, groups=tuple(groups))


class GroupedReplay:
    """The replays of an optimizer's groups, whose parameters are listed by name (:func:`by_names`)."""

    def __init__(self, optimizer: Any, coarse: Any) -> None:
        self.optimizer, self.coarse = optimizer, coarse
        self.replays: dict[Any, Any] = {}

    def _of(self, name: str) -> tuple[Any, float]:
        own, factor = in_group(self.optimizer, name, 0)
        if own not in self.replays:
            self.replays[own] = own.replay(self.coarse)
        return self.replays[own], factor

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        replay, factor = self._of(name)
        change, magnitude = replay.step(name, grad, weight, factor * lr)
        # On a device factor and product are rounded to fp32, too; a change is proportional to its rate.
        return change, magnitude + 2 * change.abs() if factor != 1 else magnitude

    def kept(self, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        return self._of(name)[0].kept(name)

    def remember(self, name: str, tensors: Mapping[str, Tensor], updates: int, at_once: bool = False) -> None:
        self._of(name)[0].remember(name, tensors, updates, at_once)


def refuse_groups(optimizer: Any, who: str) -> None:
    """Raises BackendUnavailable where there are groups: ``who`` knows nothing of them."""
    if _groups_of(optimizer):
        raise BackendUnavailable(f"{who} updates all parameters alike: it has no task.optimizer.groups")
