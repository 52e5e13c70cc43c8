"""The forced replay of steps that show what other steps do not: the first step, and a step at sharp weights.

At the initial weights attention is nearly uniform and units stay near 0, so a soft cap, a saturation or positions that
are rounded change hardly anything. At sharp weights (``sharp.py``) they do. All entrants of a race share these weights.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompare.contract import Batches, Walk, called_module, promises_of, watched_products
from mpcompare.dtypes import torch_dtype
from mpcompare.instruments import heap
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.precision import FORMATS
from mpcompare.stored import Stored
from mpcompare.tasks.task import Params, buffers_of, sharing_parameters
from mpcompare.verdict.examine.drive import RETRIES
from mpcompare.verdict.examine.errors import gradient_error
from mpcompare.verdict.examine.forced.kernels import of_kernels
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError
from mpcompare.verdict.examine.forced.record import OUTPUT, Record, calls_of
from mpcompare.verdict.examine.forced.recorder import recorded
from mpcompare.verdict.examine.forced.replay import Recorded
from mpcompare.verdict.examine.forced.rows import has_other_whole_numbers, is_rounded
from mpcompare.verdict.examine.forced.step import compared_with_the_replay
from mpcompare.verdict.examine.new_step import gradients_of
from mpcompare.verdict.examine.seen import all_finite, said_norm
from mpcompare.verdict.examine.sharp import sharp_weights
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.errors import Errors
from mpcompare.verdict.judge.limits import K
from mpcompare.verdict.judge.replayed import Layers


def layers_of_first_step(subject: Subject, sharp: bool = False) -> Layers | None:
    """Returns the first step whose gradients are finite, layer by layer; None where there is none, or the backend does
    not show its layers.

    Args:
        sharp: whether the step begins at weights at which nothing is nearly linear, and not at the initial weights.

    Raises:
        NotReplayedError: as :func:`layers_of`.
    """
    network, precision = subject.model, subject.precision
    if sharp:
        weights = subject.exact_values.once(f"sharp-{precision.name}", sharp_weights, precision)
        network = subject.network(weights)
    backend: Any = subject.make_backend(network, subject.scaling)
    if called_module(backend) is None and watched_products(backend) is None:
        return None
    formats = {precision.storage.name, promises_of(backend).weights}
    own = replaced_buffers(network, backend.buffers(), {torch_dtype(FORMATS[each]) for each in formats})
    for _ in range(RETRIES if isinstance(subject.scaling, DynamicLossScale) else 1):
        before = sharing_parameters(network, {**backend.buffers(), **own})
        walk = Walk(backend, subject.first_batch, subject.first_lr)
        if found := layers_of(subject, walk, recorded_step(subject, before, walk, subject.first_batch)):
            return found
        walk.finish()
    return None


def replaced_buffers(network: nn.Module, shown: Params, formats: Iterable[torch.dtype]) -> Params:
    """Returns the buffers of a network that a new backend shows with other numbers, which are not rounded to one of the
    formats either. A step is replayed with the network's own ones, so that it shows what is wrong."""
    own = buffers_of(network)
    pairs = ((name, b.to(own[name].device)) for name, b in shown.items() if name in own)
    return {name: own[name] for name, b in pairs if not any(is_rounded(b, own[name], each) for each in formats)}


def recorded_step(subject: Subject, network: nn.Module, walk: Walk, batch: Batches, kept: bool = False) -> Recorded:
    """Takes a step as :func:`gradients_of` does, and returns it with the record of its layers.

    Args:
        network: in the state that the step begins with.
        walk: the step of ``batch``.
        kept: whether the gradients are needed after they are clipped.
    """
    backend, scale = walk.backend, float(walk.backend.loss_scale())
    with _recorded_layers(backend, batch) as record:
        loss, grads = gradients_of(walk, kept)
    buffers, storage = Stored(backend.buffers()), torch_dtype(subject.precision.storage)
    return Recorded(record, network, subject.task.loss_fn, batch, loss, grads, scale, buffers, storage=storage)


def layers_of(subject: Subject, walk: Walk, step: Recorded) -> Layers | None:
    """Returns a recorded step, layer by layer; None where it overflows, and where the backend does not show its layers.
    The gradients of a ``walk`` in one piece are clipped.

    Raises:
        NotReplayedError: the step drew random numbers that are not the network's, or its layers are called by other
            rules than modules are.
    """
    if step.record.hidden:
        raise NotReplayedError(step.record.hidden)
    if not step.record.calls or not step.grads or not all_finite(step.grads):
        return None
    factor = subject.rule_of(walk.backend).clip_factor(said_norm(walk.backend)) if walk.in_one_piece else 1.0
    if factor != 1:
        step = replace(step, grads={name: g / factor for name, g in step.grads.items()})
    heap.trim()  # a replay has tensors of other sizes
    layers = compared_with_the_replay(step, subject.precision)
    given = [""] if has_other_whole_numbers(step.record.calls[OUTPUT], step.batches) else []
    others = given + layers.other_whole_numbers
    return replace(layers, of_kernels=_compared_with_kernels(step, layers), other_whole_numbers=others)


def _compared_with_kernels(step: Recorded, layers: Layers) -> Errors:
    far = {name: e for name, e in layers.gradients.items() if e and e.error > K * layers.rounding[name].error}
    made = of_kernels(step.network, step.record, {}, (), far).grads if far else {}
    # The gradients that arrive at the norms belong to a loss that may be multiplied by a factor.
    scale = step.scale * layers.factor
    errors = {name: gradient_error(step.grads[name], g.double() / scale) for name, g in made.items() if name in far}
    return {name: e for name, e in errors.items() if e.residual < far[name].residual}


@contextmanager
def _recorded_layers(backend: Any, batch: Batches) -> Iterator[Record]:
    """Yields the record of the step that a backend takes on a batch while it is entered. The record is complete at the
    end, and empty where the backend does not show its layers."""
    if (module := called_module(backend)) is not None:
        with recorded(module) as record:
            yield record
    elif (watched := watched_products(backend)) is not None:
        record = Record()
        with watched as products:
            yield record
        record.calls.update(calls_of(products, [x for x, _ in batch]))
    else:
        yield Record()


def unrecorded(backend: Any) -> AbstractContextManager[Any]:
    """Returns a context in which a step computes the bits that it has where the step of ``backend`` is recorded: while
    any mode is entered, torch computes some derivatives, such as the derivative of ``prod``, by other formulas."""
    return nullcontext() if called_module(backend) is None else _Nothing()


class _Nothing(TorchDispatchMode):
    """Computes each operation as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
