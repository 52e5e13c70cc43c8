"""The random numbers of a recorded step, fed to its replay: masks of dropout, noise, whatever a network draws.

A number is known by the state of torch's generator before it was drawn. A checkpoint that computes a layer once more
puts the generator back, and so draws the same numbers.
"""

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

# By generator's state, operator and shape: the tensors drawn, and the state after it.
Drawn = dict[tuple[int, str, torch.Size], tuple[list[Tensor], Tensor]]
_DROPOUT = torch.ops.aten.native_dropout.default


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class _Generator:
    """The generator that an operator draws from: that of the device of its first tensor."""

    def __init__(self, arguments: Any) -> None:
        tensors = [t for t in tree_flatten(arguments)[0] if isinstance(t, Tensor)]
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def get(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def set(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def fingerprint(self) -> int:
        return zlib.crc32(self.get().numpy().tobytes())


class OtherNumbersError(Exception):
    """The network draws random numbers in its replay that the recorded step did not draw."""


class Noted(TorchDispatchMode):
    """Writes down the result of each random operation while it is entered."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_random(func):
            return func(*args, **(kwargs or {}))
        generator = _Generator((args, kwargs))
        before = generator.fingerprint()
        result = func(*args, **(kwargs or {}))
        if generator.fingerprint() != before:  # an attention without dropout draws nothing
            numbers = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
            self.drawn[before, func.name(), numbers[0].shape] = [t.detach().clone() for t in numbers], generator.get()
        return result


class Fed(TorchDispatchMode):
    """Gives each random operation the numbers that were written down, in its own dtype, while it is entered."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_random(func):
            return func(*args, **(kwargs or {}))
        generator = _Generator((args, kwargs))
        before = generator.fingerprint()
        result = func(*args, **(kwargs or {}))
        values, spec = tree_flatten(result)
        noted = self.drawn.get((before, func.name(), values[0].shape))
        if noted is None:
            if generator.fingerprint() != before:
                raise OtherNumbersError(f"{func.name()} drew other random numbers in the step")
            return result
        numbers, after = noted
        generator.set(after)  # a number of another dtype may take another number of draws
        if func is _DROPOUT:  # its result is the input, masked
            x, p = args[0], args[1]
            mask = numbers[1]
            return x * mask.to(x.dtype) / (1 - p), mask
        for value, number in zip(values, numbers, strict=True):
            value.copy_(number)
        return tree_unflatten(values, spec)
