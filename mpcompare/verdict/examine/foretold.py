"""The memory that an examination will take, told before it begins.

The examination takes as much as the pass that holds the most. What a pass holds is read off its code, and each number
below counts tensors. Their sizes are known: one forward pass of the network in fp32 tells the sizes of activations, and
the bytes that a backend holds and that a training step takes were measured.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from mpcompare.contract import Batches
from mpcompare.precision import Precision
from mpcompare.stored import LARGE
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.draws import as_examined
from mpcompare.tasks.losses import Loss
from mpcompare.verdict.examine import oracle
from mpcompare.verdict.examine.forced.places import ELEMENTS, FEW
from mpcompare.verdict.examine.forced.roundings import in_operations
from mpcompare.verdict.examine.forced.samples import SAMPLES
from mpcompare.verdict.examine.rounding import ROWS, first_rows_are_independent

LIBRARIES = 50 << 20  # bytes of torch's libraries that the oracle's process touches when it computes its first step
DOUBLE = 2  # the size of a number in float64, where a number in fp32 has size 1
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Held:
    """Bytes that are known when training has ended."""

    now: int  # the bytes of the entrant's process, beyond its libraries
    # params, largest: the bytes of all parameters in fp32, and of the largest one
    params: int
    largest: int
    moments: int  # the bytes of everything that the optimizer remembers
    step: int  # the most that training took beyond what was there before it

    @property
    def backend(self) -> int:
        """The bytes of a backend in its step: parameters, moments, gradients, copies of 16 bits, activations. A step of
        training took no less, but may have found freed memory."""
        return max(self.step, 2 * self.params + self.moments)


@dataclass
class Activations:
    """The bytes, in fp32, that a network makes of one micro-batch."""

    rows: int  # the rows of the micro-batch
    # inputs, outputs: the bytes of all calls of layers (modules without modules in them)
    inputs: int = 0
    outputs: int = 0
    largest: int = 0  # the inputs and outputs of the largest call
    between: int = 0  # what backward needs besides parameters and the inputs of the layer that keeps them
    # the most that a convolution makes of its input in float64 on a CPU: each number is there once for each element of
    # the kernel
    columns: int = 0
    points: int = 0  # the numbers, and no bytes, that a replay keeps of inputs, outputs, and the gradients of both

    def of(self, rows: int) -> "Activations":
        """Returns the bytes for so many rows at most."""
        share = min(rows / self.rows, 1.0)
        sizes = {name: round(share * size) for name, size in vars(self).items() if name != "rows"}
        return Activations(min(rows, self.rows), **sizes)


def foretold(
    held: Held, network: nn.Module, loss_fn: Loss, batches: Batches, precision: Precision, exact_here: bool
) -> int:
    """Returns the bytes that an examination will take, in all processes, beyond their libraries.

    Args:
        network: the task's network, in fp32.
        batches: the micro-batches of a step.
        exact_here: whether the oracle is computed in the entrant's process.
    """
    made = activations_of(network, loss_fn, batches)
    with in_operations(network), sdpa_kernel(SDPBackend.MATH):  # attention and recurrent layers, result by result
        by_operation = activations_of(network, loss_fn, batches)
    apart = made.rows > ROWS and first_rows_are_independent(network, loss_fn, batches)
    needs = (
        _oracle(held, made.of(oracle.ROWS) if apart else made),
        _roundings(held, by_operation.of(ROWS) if apart else by_operation, precision),
        _trained_step(held, made, precision, len(batches)),
        _replay(held, made, precision, len(batches)) + _samples(network, made, len(batches)),
        _loaded(held),
    )
    return held.now + (0 if exact_here else LIBRARIES) + max(needs)


def _oracle(held: Held, made: Activations) -> int:
    """The network in fp32; its copy, and the gradients, in float64. Every output of a layer, with its gradient; and the
    most of two things: an output times its gradient, squared, or the columns of a convolution."""
    return (1 + 2 * DOUBLE) * held.params + DOUBLE * (2 * made.outputs + max(3 * made.largest // 2, made.columns))


def _roundings(held: Held, made: Activations, precision: Precision) -> int:
    """The network in fp32; its copy, its gradients, and the gradients of a rounded step, in the dtype in which
    roundings are sampled. What forward keeps, and the gradients of activations."""
    dtype = _of_samples(precision)
    return held.params + dtype * 3 * held.params + _sampled(made, dtype)


def _trained_step(held: Held, made: Activations, precision: Precision, micro_batches: int) -> int:
    """A copy of the trained network; a new backend, which remembers nothing yet, in its step; the record of a step."""
    return held.params + held.backend - held.moments + _record(made, precision, micro_batches)


def _replay(held: Held, made: Activations, precision: Precision, micro_batches: int) -> int:
    """The network at sharp weights; a backend with these weights, and their gradients; the record of its step; and what
    a replay makes, exact or rounded: a part is freed until backward, but malloc keeps its pages. For one layer at a
    time, in float64, the parameters, their gradient, and a freed gradient whose pages malloc keeps; and the operands
    and results of the largest call. If the gradients that products pass down are large, they lie in a file."""
    exact = DOUBLE * (made.outputs + made.between + made.largest + made.columns)
    made_there = max(exact, _sampled(made, _of_samples(precision))) + min(made.inputs, LARGE)
    return 3 * held.params + _record(made, precision, micro_batches) + made_there + 3 * DOUBLE * held.largest


def _samples(network: nn.Module, made: Activations, micro_batches: int) -> int:
    """Some elements of each tensor, which all replays of a step keep in 64 bits: their places, their weights, the exact
    numbers, and the numbers of each sample. Where roundings are large there are more samples."""
    of_params = sum(min(p.numel(), ELEMENTS["parameter"]) for p in network.parameters())
    return (3 + SAMPLES) * torch.float64.itemsize * (of_params + micro_batches * made.points)


def _loaded(held: Held) -> int:
    """A backend in its step, as the passes ``aged`` and ``resume`` have it. The moments that it loads are mapped from a
    file. The weights before its step, and its gradients, as far as they do not lie in a file. For one tensor the
    oracle's gradient in float64, which is mapped, and the gradient that is compared with it."""
    return held.backend + held.moments + 2 * min(held.params, LARGE) + (DOUBLE + 1) * held.largest


def _record(made: Activations, precision: Precision, micro_batches: int) -> int:
    """The record of a step: inputs, outputs, and the gradients of outputs, as the precision has them."""
    return micro_batches * (made.inputs + 2 * made.outputs) // (2 if precision.is_16_bit else 1)


def _sampled(made: Activations, dtype: int) -> int:
    """Each result is rounded: nothing that backward needs is shared with what was recorded. The columns of a
    convolution have gradients, too."""
    columns = 2 * made.columns if dtype == DOUBLE else 0
    return dtype * (made.inputs + made.outputs + made.between + columns)


def _of_samples(precision: Precision) -> int:
    """The size of a number where roundings are sampled: fp32 arithmetic shows errors of 16 bits."""
    return 1 if precision.is_16_bit else DOUBLE


def activations_of(network: nn.Module, loss_fn: Loss, batches: Batches) -> Activations:
    """Counts what a copy of the network makes of the first micro-batch, forward."""
    x, y = batches[0]
    counted = _Counted(Activations(len(x)))
    counted.watch(copied := copy_of(network))
    kept = torch.autograd.graph.saved_tensors_hooks(counted.saved, lambda nothing: nothing)
    with as_examined(x.device), torch.enable_grad(), kept:
        loss_fn(copied(x), y)
    return counted.made


@dataclass
class _Counted:
    """Counts the tensors of a network that is called. It holds neither the network nor the graph, whose hooks hold it.
    So all three are gone as soon as nobody needs them."""

    made: Activations
    params: set[int] = field(default_factory=set)  # the storages of the parameters
    given: set[int] = field(default_factory=set)  # the storages of the inputs of the layer that is called
    # By a storage's number and the place in it: q, k and v may lie in one. A freed storage would lend its number.
    kept: dict[tuple[int, int], UntypedStorage] = field(default_factory=dict)

    def watch(self, network: nn.Module) -> None:
        """Counts the calls of the network's layers from now on."""
        self.params |= set(map(_storage, network.parameters()))
        for module in network.modules():
            if not any(True for _ in module.children()):
                module.register_forward_pre_hook(self._called, with_kwargs=True)
                module.register_forward_hook(self._returned, with_kwargs=True)

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.given = set(map(_storage, _tensors((args, kwargs))))

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self.given, made = set(), self.made
        tensors = _tensors((args, kwargs)), _tensors(result)
        given, returned = (sum(t.nbytes for t in each) for each in tensors)
        made.inputs, made.outputs = made.inputs + given, made.outputs + returned
        made.largest = max(made.largest, given + returned)
        made.points += 2 * sum(min(t.numel(), FEW) for each in tensors for t in each)
        if isinstance(module, CONVOLUTIONS):
            made.columns = max(made.columns, given * prod(module.kernel_size) // prod(module.stride))

    def saved(self, tensor: Tensor) -> None:
        """Counts a tensor that backward needs. Nobody goes backward, so the graph keeps none."""
        storage = _storage(tensor)
        place = storage, int(tensor.storage_offset())
        if storage not in self.params | self.given and place not in self.kept:
            self.kept[place] = tensor.untyped_storage()
            self.made.between += tensor.nbytes


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(nest: Any) -> list[Tensor]:
    return [t for t in tree_leaves(nest) if isinstance(t, Tensor)]
