"""The things that a watch is attached to: the network and the optimizers within their wrappers."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mpcompare.dtypes import HALF
from mpcompare.errors import InputError
from mpcompare.tasks.groups import params_in
from mpcompare.verdict.examine.numerics import same_bits, spread

Optimizers = dict[str, torch.optim.Optimizer]


@dataclass(frozen=True)
class Attached:
    """A network and its optimizers."""

    network: nn.Module  # the network within its wrappers, whose parameters have names
    models: dict[str, nn.Module]  # the networks as the loop calls them, by the user's names; a single one has no name
    optimizers: Optimizers  # torch's own, by the names that the user gave them
    hides_layers: bool  # whether the layers call no hooks, because the loop runs compiled code
    others: int  # the number of parameters of the optimizers that the network does not have
    eager: bool  # whether the loop runs without the compiler while it is looked at
    masters: dict[str, Tensor]  # by the names of weights the masters that optimizers have in their place
    strangers: list[str] = field(default_factory=list)  # optimizers with steps that no watch was given, in words

    @property
    def is_alone(self) -> bool:
        """Whether one optimizer takes all steps, with parameters of the network alone."""
        return len(self.optimizers) == 1 and not self.others and not self.strangers

    def owned(self) -> set[str]:
        """Returns the names of the parameters that the optimizers have."""
        own = {id(p) for each in self.optimizers.values() for p in params_in(each)}
        return {n for n, p in self.network.named_parameters() if id(p) in own or n in self.masters}

    def name_of(self, optimizer: Any) -> str | None:
        """Returns the name of an optimizer, which may be a wrapper; None where it is not watched."""
        inner = unwrapped(optimizer)
        return next((name for name, each in self.optimizers.items() if each is inner), None)


def attached(model: Any, optimizer: Any, eager: bool) -> Attached:
    """Returns what there is to watch.

    Raises:
        InputError: there is no network, no optimizer, or an optimizer without any of the network's parameters.
    """
    network, models = networks_of(model)
    named = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
    if isinstance(optimizer, (list, tuple)):
        named = {f"optimizer {number}": each for number, each in enumerate(optimizer, start=1)}
    expected = "expected a torch.optim.Optimizer, or several by name"
    if not named:
        raise InputError("watch: optimizer", optimizer, expected)
    found: Optimizers = {}
    for name, each in named.items():
        inner = unwrapped(each)
        if inner is None:
            raise InputError(f"watch: {name}", type(each).__name__, expected)
        found[name] = inner
    params = {name: params_in(each) for name, each in found.items()}
    masters = masters_of(network, chain.from_iterable(params.values()))
    known = {id(p) for p in (*network.parameters(), *masters.values())}
    for name, own in params.items():
        if not any(id(p) in known for p in own):
            other = f"has none of the parameters of {type(network).__name__}"
            raise InputError(f"watch: {name}", type(found[name]).__name__, other)
    others = sum(id(p) not in known for own in params.values() for p in own)
    for name, module in network.named_modules():
        if not callable(vars(module).get("parameters", module)):
            hides = "has an attribute parameters, which hides the method of torch.nn.Module: rename the attribute"
            raise InputError("watch: model", name or type(network).__name__, hides)
    hides_layers = any(map(is_compiled, models.values())) and not eager
    return Attached(network, models, found, hides_layers, others, eager, masters)


def masters_of(network: nn.Module, params: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns those parameters of optimizers that are masters, by the names of their weights: wider copies that a loop
    makes itself of a network in 16 bits. It hands each gradient to the master of its weight, and copies the master back
    after the update (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1). Several weights may have
    the same numbers, such as biases of 0. Their masters are expected in the order of the weights."""
    given, weights = {id(p): p for p in params}, dict(network.named_parameters())
    left = {n: p for n, p in weights.items() if p.requires_grad and p.dtype in HALF and id(p) not in given}
    own, found = set(map(id, weights.values())), {}
    for master in (p for place, p in given.items() if place not in own):
        if (name := next((n for n, p in left.items() if _is_master(master, p)), None)) is not None:
            found[name] = master
            del left[name]
    return found


def _is_master(master: Tensor, weight: Tensor) -> bool:
    if master.shape != weight.shape or master.dtype in HALF or not master.is_floating_point():
        return False
    return same_bits(spread(master).to(weight.device, weight.dtype), spread(weight))


class Together(nn.ModuleDict):
    """Several networks that are watched as one. The loop calls each of them."""


def networks_of(model: Any) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Returns one network, or several as one, and the modules that the loop calls.

    Raises:
        InputError: ``model`` is neither.
    """
    several = dict(enumerate(model)) if isinstance(model, (list, tuple)) else model
    if isinstance(several, Mapping) and several and all(isinstance(each, nn.Module) for each in several.values()):
        try:
            network = Together({str(name): _called(each) for name, each in several.items()})
            return network, dict(network.named_children())
        except KeyError as error:  # a name that a module cannot have
            raise InputError("watch: model", ", ".join(map(str, several)), str(error.args[0])) from error
    if not isinstance(model, nn.Module):
        raise InputError("watch: model", type(model).__name__, "expected a torch.nn.Module, or several by name")
    if (inner := inner_of(model)) is model:
        model = compiled_wrapper(inner) or model
    return inner, {"": model}


def _called(model: nn.Module) -> nn.Module:
    """Returns what ``torch.compile`` made of a network that the loop calls, or else the network within its wrappers."""
    if is_compiled(model):
        return model
    return inner_of(model) if (compiled := compiled_wrapper(model)) is None else compiled


def inner_of(model: nn.Module) -> nn.Module:
    """Returns the network within wrappers of torch, Lightning Fabric and others."""
    while True:
        if isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, (DataParallel, DistributedDataParallel)) or hasattr(model, "_forward_module"):
            model = cast(nn.Module, model.module)
        else:
            return model


def compiled_wrapper(network: nn.Module) -> nn.Module | None:
    """Returns the compiled module that the loop calls in place of a network; None where ``torch.compile`` made none.
    Hooks within this module would be compiled, too, and change what it computes."""
    return next((o for o in alive(OptimizedModule) if o._orig_mod is network), None)


def alive(*kinds: type) -> Iterator[Any]:
    """Yields the objects of some classes that are alive."""
    return (each for each in gc.get_objects() if issubclass(type(each), kinds))


def unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """Returns torch's optimizer within wrappers, such as the wrappers of Accelerate, Lightning or sharpness-aware
    minimization; None where there is none."""
    for _ in range(8):
        own = getattr(optimizer, "__dict__", {})
        inner = next((own[name] for name in ("optimizer", "_optimizer", "base_optimizer") if name in own), None)
        if not hasattr(inner, "param_groups"):
            break
        optimizer = inner
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def is_compiled(model: nn.Module) -> bool:
    """Returns whether a compiler has a network or some of its layers."""
    return any(
        isinstance(m, OptimizedModule) or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()
    )
