"""The random numbers of a recorded step, fed to its replay: masks of dropout, noise, whatever a network draws.

A number is known by the state of torch's generator before it was drawn. A checkpoint that computes a layer once more
puts the generator back, and so draws the same numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpcompare.generators import CPU, DeviceGenerator

Key = tuple[int, str, torch.Size]  # the generator's state, the operator, and the shape of its result
Drawn = dict[Key, tuple[list[Tensor], Tensor]]  # the tensors drawn, and the state after it
_DROPOUT = torch.ops.aten.native_dropout.default


class NotReplayedError(Exception):
    """A recorded step cannot be replayed layer by layer; the message says why."""


class OtherPathError(NotReplayedError):
    """A replay takes another path than the step: another number of rows comes to a layer, as to an expert."""


class _AtRandom(TorchDispatchMode):
    """Hands each random operation that draws numbers to ``drew`` while it is entered; what that returns is the result.
    An attention without dropout draws nothing."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        generator = DeviceGenerator(tensors[0].device if tensors else CPU)
        before = generator.fingerprint()
        result = func(*args, **(kwargs or {}))
        if generator.fingerprint() == before:
            return result
        numbers, spec = tree_flatten(result)
        return tree_unflatten(self.drew((before, func.name(), numbers[0].shape), func, args, numbers, generator), spec)

    def drew(self, key: Key, func: Any, args: Any, numbers: list[Any], generator: DeviceGenerator) -> list[Any]:
        raise NotImplementedError


def copied(value: Tensor) -> Tensor:
    """Returns a copy, without its gradient."""
    return value.detach().clone()


class Noted(_AtRandom):
    """Writes down the numbers of each random operation: of a dropout its mask, of another all that it returns.

    Attributes:
        copy: makes the copies that are kept.
    """

    def __init__(self, drawn: Drawn, copy: Callable[[Tensor], Tensor] = copied) -> None:
        super().__init__(drawn)
        self.copy = copy

    def drew(self, key: Key, func: Any, args: Any, numbers: list[Any], generator: DeviceGenerator) -> list[Any]:
        kept = numbers[1:] if func is _DROPOUT else numbers
        self.drawn[key] = [self.copy(t) for t in kept if isinstance(t, Tensor)], generator.get()
        return numbers


class Fed(_AtRandom):
    """Gives each random operation the numbers that were written down, in its own dtype.

    Attributes:
        operand: is given those that were drawn in 16 bits, and returns the ones that are taken. A mask that is divided
            by a probability in 16 bits is rounded.

    Raises:
        NotReplayedError: none were written down for it.
    """

    def __init__(self, drawn: Drawn, operand: Callable[[Tensor], Tensor] = lambda numbers: numbers) -> None:
        super().__init__(drawn)
        self.operand = operand

    def drew(self, key: Key, func: Any, args: Any, numbers: list[Any], generator: DeviceGenerator) -> list[Any]:
        if key not in self.drawn:
            raise NotReplayedError(f"{func.name()} drew other random numbers in the step")
        noted, after = self.drawn[key]
        generator.set(after)  # a number of another dtype may take another number of draws
        if func is _DROPOUT:  # its result is the input, masked
            x, p = args[0], args[1]
            return [x * noted[0].to(x.dtype) / (1 - p), noted[0]]
        for value, number in zip(numbers, noted, strict=True):
            value.copy_(number)
        return [self.operand(v) if n.dtype.itemsize == 2 else v for v, n in zip(numbers, noted, strict=True)]
