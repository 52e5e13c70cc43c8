"""Any optimizer that works element by element: of ``torch.optim``, of a package, or a user's own.

Its replay is its own code in float64, on the gradients that a backend shows. The code does not say how far fp32 may be
from it, so this is found out. Each input of an update is moved by as much as some roundings move it, and the update is
taken again. A rounding on the way to a result is a movement of the result's inputs (backward error analysis: Higham,
Accuracy and Stability of Numerical Algorithms, 2002, section 1.5).
"""

import inspect
import pydoc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mpcompare.errors import BackendUnavailable, InputError, check_number, in_full
from mpcompare.stored import Stored
from mpcompare.tasks.groups import Group, GroupedReplay, Parameters, for_torch, read_groups
from mpcompare.tasks.optimizers import IN_FP32, Coarse, UpdateReplay

U = 2.0**-24  # the unit roundoff of fp32
ROUNDINGS = 32  # the roundings of each input of an update, on its way into the new weight
OF_WEIGHT = 3  # the roundings of a weight that an update changes in several parts; the last is counted elsewhere
SMALLEST = 2.0**-126  # the smallest normal number of fp32

Maker = Callable[[nn.Parameter], torch.optim.Optimizer]
Params = dict[str, Tensor]
State = dict[str, Any]  # what an optimizer remembers of one parameter, by its own names


@dataclass(frozen=True)
class AnyOptimizer:
    """An optimizer by the name of its class. Raises InputError where there is no such class, it does not take these
    arguments, or an update of an element depends on others (Adafactor, Muon, LBFGS), on random numbers, or on more than
    a gradient."""

    linear: ClassVar[bool] = False  # it is not known
    bounded: ClassVar[bool] = True
    name: str  # dotted, such as ``torch.optim.RAdam``
    lr: float = 1e-3  # above 0, finite
    weight_decay: float | None = None  # None: the default of the class
    settings: tuple[tuple[str, Any], ...] = ()  # names and values of its other arguments
    groups: tuple[Group, ...] = ()  # parameters with values of their own (:mod:`mpcompare.tasks.groups`)

    def __post_init__(self) -> None:
        check_number("task.optimizer.lr", self.lr, above=0)
        settings = self.settings.items() if isinstance(self.settings, Mapping) else self.settings
        hashable = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in settings)
        object.__setattr__(self, "settings", hashable)
        object.__setattr__(self, "groups", read_groups(self.groups))
        if fault := fault_of(self._of_one, self.lr):
            raise InputError("task.optimizer._target_", self.name, fault)

    @cached_property
    def remembers(self) -> bool:
        return bool(self._kinds)

    def initial_state(self, like: Tensor) -> dict[str, Tensor]:
        """Tensors that the optimizer makes in its first update are 0 before it."""
        optimizer = self._of_one(p := nn.Parameter(like.detach().clone()))
        before = optimizer.state.get(p, {})
        kinds = {kind: torch.zeros_like(like) if dims > 0 else torch.zeros(()) for kind, dims in self._kinds.items()}
        return {**kinds, **{kind: value for kind, value in before.items() if isinstance(value, Tensor)}}

    def make(self, params: Parameters, fused: bool = False) -> torch.optim.Optimizer:
        """Raises BackendUnavailable where it shall be fused, and has no such kernel."""
        if fused and "fused" not in inspect.signature(self._class).parameters:
            raise BackendUnavailable(f"{self.name} has no fused kernel")
        return self._made(for_torch(self, params), **({"fused": True} if fused else {}))

    def replay(self, coarse: Coarse = IN_FP32) -> UpdateReplay:
        return GroupedReplay(self, coarse) if self.groups else OwnReplay(self._of_one, self._kinds, coarse)

    @cached_property
    def _class(self) -> Callable[..., torch.optim.Optimizer]:
        try:
            found: Any = pydoc.locate(self.name)
        except pydoc.ErrorDuringImport as error:
            raise InputError("task.optimizer._target_", self.name, f"cannot be imported ({error})") from error
        if found is None:
            raise InputError("task.optimizer._target_", self.name, "cannot be imported")
        return found

    def _made(self, params: Any, **more: Any) -> torch.optim.Optimizer:
        decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return self._class(params, lr=self.lr, **decay, **dict(self.settings), **more)

    def _of_one(self, p: nn.Parameter) -> torch.optim.Optimizer:
        return self._made([p])

    @cached_property
    def _kinds(self) -> dict[str, int]:
        """The dimensions of each thing that is remembered of a matrix; -1 for a Python number."""
        _, state = _updated(self._of_one, torch.ones(2, 2), torch.ones(2, 2), {}, self.lr)
        return {kind: value.dim() if isinstance(value, Tensor) else -1 for kind, value in state.items()}


def fault_of(make: Maker, lr: float) -> str:
    """Returns why the updates of an optimizer cannot be replayed; empty where each element is updated by its own
    gradient and weight. ``make`` makes the optimizer of one parameter."""
    generator = torch.Generator().manual_seed(0)
    w, *grads = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)

    def part(cut: Callable[[Tensor], Tensor]) -> Tensor:
        weight: Tensor = cut(w)
        state: State = {}
        for grad in grads:
            weight, state = _updated(make, weight, cut(grad), state, lr)
        return weight

    try:
        whole = part(lambda t: t)
        halves = torch.cat([part(lambda t: t[:, :1]), part(lambda t: t[:, 1:])], dim=1)
        flat = part(torch.flatten).view_as(w)
    except InputError:  # there is no such class
        raise
    except Exception as error:
        return f"cannot update a parameter by its gradient alone ({in_full(error)})"
    if not all(torch.allclose(whole, other, rtol=1e-9, atol=1e-12) for other in (halves, flat)):
        return "its update of an element depends on other elements, or on random numbers, and cannot be replayed"
    if torch.equal(whole, w):
        return "it moves no parameter in float64"
    optimizer = make(p := nn.Parameter(w.clone()))
    for p.grad in grads:
        optimizer.step()
    if not torch.allclose(whole, p.detach(), rtol=1e-9, atol=1e-12):
        return "it remembers something that is not in its state of a parameter, such as a count in its group"
    return ""


def _updated(make: Maker, weight: Tensor, grad: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
    """Returns the weight after an update, and what is remembered then; the arguments stay as they are."""
    p = nn.Parameter(weight.clone())
    optimizer = make(p)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if state:
        optimizer.state[p] = {kind: v.clone() if isinstance(v, Tensor) else v for kind, v in state.items()}
    p.grad = grad.clone()
    optimizer.step()
    return p.detach(), {kind: value for kind, value in optimizer.state[p].items() if value is not None}


class OwnReplay:
    """An optimizer's own code in float64.

    A new weight ``w'`` and the state ``s'`` follow from g, w and the state s. Each of g, w and s is moved up and down
    by ``ROUNDINGS`` roundings of itself, s also by the error that it has already. The largest changes of ``w' - w`` and
    of s', summed up over g, w and s, are the errors that fp32 may make. So ``sign(s)`` may be either sign where s is
    next to 0. A zero is exact.
    """

    def __init__(self, make: Maker, kinds: Mapping[str, int], coarse: Coarse = IN_FP32) -> None:
        """``make`` makes the optimizer of one parameter. ``kinds`` are the dimensions of what it remembers: 0 for a
        number that all elements share, -1 for a Python number."""
        self.make, self.kinds, self.coarse = make, kinds, coarse
        self.states: dict[str, State] = {}  # the part without an element for each weight, such as the count
        self.tensors: dict[str, Stored] = {}
        self.errors: dict[str, Stored] = {}

    def remember(self, name: str, tensors: Mapping[str, Tensor], updates: int, at_once: bool = False) -> None:
        if tensors or (updates and all(dims <= 0 for dims in self.kinds.values())):
            known = {"step": torch.tensor(float(updates)), **tensors}
            dims = {kind: self.kinds[kind] for kind in known if kind in self.kinds}
            self.states[name] = {kind: _number(known[kind], dims[kind]) for kind in dims if dims[kind] <= 0}
            self.tensors[name] = Stored({kind: known[kind] for kind in dims if dims[kind] > 0})
            self.errors[name] = Stored({kind: torch.zeros_like(t) for kind, t in self.tensors[name].items()})

    def kept(self, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        if name not in self.tensors:
            return {}
        errors = self.errors[name]
        return {kind: (value, errors[kind] / U + 2.0**-102) for kind, value in self.tensors[name].items()}

    def step(self, name: str, grad: Tensor, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        tensors: Params = dict(self.tensors.get(name, {}))
        known: Params = dict(self.errors.get(name, {}))
        rest, u = self.states.get(name, {}), ROUNDINGS * self.coarse.arithmetic * U
        given = {"weight": weight, "grad": grad, **{f"state {kind}": t for kind, t in tensors.items()}}

        def update(values: Mapping[str, Tensor]) -> tuple[Tensor, State]:
            state = {**rest, **{kind: values[f"state {kind}"] for kind in tensors}}
            new, after = _updated(self.make, values["weight"], values["grad"], state, lr)
            return new - values["weight"], after

        change, after = update(given)
        shaped = {kind: t for kind, t in after.items() if isinstance(t, Tensor) and t.shape == weight.shape}
        error = OF_WEIGHT * self.coarse.arithmetic * U * weight.abs() + u * change.abs()
        errors = {kind: (u + self.coarse.moments * U) * t.abs() for kind, t in shaped.items()}
        for moved, value in given.items():
            by = torch.where(value != 0, u * value.abs() + SMALLEST, 0.0)
            by += known[moved.removeprefix("state ")] if moved.startswith("state ") else 0.0
            ways = [update({**given, moved: value + way * by}) for way in (1, -1)]
            error += _furthest([other for other, _ in ways], change)
            for kind, right in shaped.items():
                errors[kind] += _furthest([each[kind] for _, each in ways], right)
        self.states[name] = {kind: value for kind, value in after.items() if kind not in shaped}
        self.tensors[name], self.errors[name] = Stored(shaped), Stored(errors)
        return change, error / U


def _number(value: Tensor, dims: int) -> Any:
    """Returns a number that all elements share, as the optimizer keeps it."""
    return value.reshape(()).float() if dims == 0 else value.item()


def _furthest(others: list[Tensor], right: Tensor) -> Tensor:
    return torch.stack([(other - right).abs() for other in others]).amax(dim=0).nan_to_num_(nan=torch.inf)
