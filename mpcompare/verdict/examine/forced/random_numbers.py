"""The random numbers of a recorded step, fed to its replay: masks of dropout, noise, whatever a network draws.

A number is known by the state of torch's generator before it was drawn. A checkpoint that computes a layer once more
puts the generator back, and so draws the same numbers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpcompare.generators import CPU, DeviceGenerator, fingerprint
from mpcompare.verdict.examine.forced.attention_masks import FusedAttention, bound, fused_attention
from mpcompare.verdict.examine.forced.choices import CHOICES, Choosing, Line
from mpcompare.verdict.examine.forced.constants import Constants, Narrow
from mpcompare.verdict.examine.forced.kinks import KINKED
from mpcompare.verdict.examine.forced.own_products import OPERATORS

Key = tuple[int, str, torch.Size]  # the generator's state, the operator, and the shape of its result
# The tensors drawn, and the state after it. A fused attention, at the shape of its weights, stands for their mask.
Drawn = dict[Key, tuple[list[Tensor] | FusedAttention, Tensor]]
NOTED = CHOICES | OPERATORS
WEIGHTS = "the weights of a fused attention"
_DROPOUT = torch.ops.aten.native_dropout.default


Source = tuple[DeviceGenerator, Tensor]  # a generator, and one of its states


class NotReplayedError(Exception):
    """A recorded step cannot be replayed layer by layer; the message says why."""


class OtherPathError(NotReplayedError):
    """A replay takes another path than the step: another number of rows comes to a layer, as to an expert."""


class _AtRandom(TorchDispatchMode):
    """While it is entered, it hands each operation that draws random numbers to ``drew``, and each operation that may
    choose or multiplies to ``chose``. Their returned values are the results. An attention without dropout draws
    nothing."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            result = func(*args, **(kwargs or {}))
            return self.chose(func, (args, kwargs), result) if func._schema.name in NOTED else result
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        generator = DeviceGenerator(tensors[0].device if tensors else CPU)
        state = generator.get()
        result = func(*args, **(kwargs or {}))
        if has_own_state(func, args, kwargs):
            self.drew_by_itself(func)
        if (before := fingerprint(state)) == fingerprint(generator.get()):
            return result
        numbers, spec = tree_flatten(result)
        key = before, func.name(), numbers[0].shape
        return tree_unflatten(self.drew(key, func, (args, kwargs), numbers, (generator, state)), spec)

    def drew(self, key: Key, func: Any, given: Any, numbers: list[Any], drawn_from: Source) -> list[Any]:
        """Is told of an operation that drew numbers.

        Args:
            given: its arguments, without names and with them.
            numbers: all that it returned.
            drawn_from: the generator, and its state before the draw.
        """
        raise NotImplementedError

    def drew_by_itself(self, func: Any) -> None:
        """Is told of an operation that drew numbers from a state of its own, which nobody can put back."""
        raise NotImplementedError

    def chose(self, func: Any, given: Any, result: Any) -> Any:
        """Is told of an operation that may choose, as a comparison does, or of a product."""
        return result


def has_own_state(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether an operation draws from a state of its own, as cuDNN's recurrent layers do for their dropout."""
    if not any(each.name == "dropout_state" for each in func._schema.arguments):
        return False
    given = bound(func, args, kwargs)
    return bool(given.get("dropout") and given.get("train", True) and given.get("num_layers", 2) > 1)


def copied(value: Tensor) -> Tensor:
    """Returns a copy, without its gradient."""
    return value.detach().clone()


class Noted(_AtRandom):
    """Writes down the numbers of each random operation: the mask of a dropout, and all results of any other operation.

    Attributes:
        copy: makes the copies that are kept.
        note: is told of each operation that may choose, or multiplies, and of its result; of each operation with kinks
            before it has one, since it may write into its operand.
        constants: notes the constants of 16 bits.
    """

    def __init__(
        self,
        drawn: Drawn,
        copy: Callable[[Tensor], Tensor] = copied,
        note: Callable[[Any, Any, Any], None] = lambda func, args, result: None,
        narrow: dict[Line, Narrow] | None = None,
    ) -> None:
        super().__init__(drawn)
        self.copy, self.note, self.constants = copy, note, Constants({} if narrow is None else narrow)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in KINKED:
            self.note(func, args, None)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.constants.note(func, args, kwargs or {}, result)
        return result

    def drew(self, key: Key, func: Any, given: Any, numbers: list[Any], drawn_from: Source) -> list[Any]:
        generator, state = drawn_from
        args, kwargs = given
        if (attention := fused_attention(func, args, kwargs, numbers[0], state, self.copy)) is not None:
            self.drawn[key[0], WEIGHTS, attention.shape] = attention, generator.get()
            return numbers
        kept = numbers[1:] if func is _DROPOUT else numbers
        self.drawn[key] = [self.copy(t) for t in kept if isinstance(t, Tensor)], generator.get()
        return numbers

    def drew_by_itself(self, func: Any) -> None:
        self.drawn[0, func.name(), torch.Size()] = [], torch.empty(0)

    def chose(self, func: Any, given: Any, result: Any) -> Any:
        self.note(func, given[0], result)
        return result


class Fed(_AtRandom):
    """Gives each random operation the numbers that were written down, in its own dtype. If the step dropped weights in
    fused attentions, attentions are computed from their parts.

    Attributes:
        operand: is given numbers that were drawn in 16 bits, and returns the numbers that are taken. A mask that is
            divided by a probability in 16 bits is rounded.
        choosing: makes the choices of the step.

    Raises:
        NotReplayedError: no numbers were written down for an operation.
    """

    def __init__(
        self,
        drawn: Drawn,
        operand: Callable[[Tensor], Tensor] = lambda numbers: numbers,
        choosing: Choosing | None = None,
    ) -> None:
        super().__init__(drawn)
        self.operand, self.choosing = operand, choosing or Choosing()
        self._kernels = ExitStack()

    def __enter__(self) -> "Fed":
        if any(name == WEIGHTS for _, name, _ in self.drawn):
            self._kernels.enter_context(sdpa_kernel(SDPBackend.MATH))
        super().__enter__()
        return self

    def __exit__(self, *of_error: Any) -> None:
        super().__exit__(*of_error)
        self._kernels.close()

    def drew(self, key: Key, func: Any, given: Any, numbers: list[Any], drawn_from: Source) -> list[Any]:
        generator, args = drawn_from[0], given[0]
        noted, after = self._noted(key)
        generator.set(after)  # a number of another dtype may take another number of draws
        if func is _DROPOUT:  # its result is the input, masked
            x, p = args[0], args[1]
            return [x * noted[0].to(x.dtype) / (1 - p), noted[0]]
        for value, number in zip(numbers, noted, strict=True):
            value.copy_(number)
        return [self.operand(v) if n.dtype.itemsize == 2 else v for v, n in zip(numbers, noted, strict=True)]

    def _noted(self, key: Key) -> tuple[list[Tensor], Tensor]:
        """Returns the tensors that were drawn in the step, and the state after the draw."""
        state, name, shape = key
        if (found := self.drawn.get(key) or self.drawn.get((state, WEIGHTS, shape))) is None:
            raise NotReplayedError(f"{name} drew other random numbers in the step")
        noted, after = found
        if isinstance(noted, FusedAttention):
            if noted.mask is None:
                raise NotReplayedError(f"the dropout within {noted.func.name()} cannot be drawn again")
            return [noted.mask], after
        return noted, after

    def drew_by_itself(self, func: Any) -> None:
        raise NotReplayedError(f"the dropout within {func.name()} has random numbers of its own")

    def chose(self, func: Any, given: Any, result: Any) -> Any:
        return self.choosing.again(func, given, result)
