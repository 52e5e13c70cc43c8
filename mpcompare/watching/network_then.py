"""The network of a loop as it was in a call, for a replay that comes later."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.task import put_buffers
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError
from mpcompare.watching.modules_then import hooks_then, set_attributes
from mpcompare.watching.steps import Sum


def as_it_was(network: nn.Module, seen: Sum, at: Sum | None = None) -> nn.Module:
    """Returns a copy of a network as it was in the first call of a sum; hooks of wrappers stay outside. A parameter
    requires a gradient if it did in any call, and if an optimizer has it.

    Args:
        at: the sum whose weights and buffers the copy has; None: its own.
    """
    at = at or seen
    assert seen.first is not None
    assert at.first is not None
    params = dict(network.named_parameters())
    if params.keys() != at.weights.keys():
        raise NotReplayedError("the network has got other layers or weights since")
    trained = seen.owned.intersection(name for called in seen.calls for name in called.trained)
    as_then = {id(p): nn.Parameter(at.weights[n].to(p.device), n in trained) for n, p in params.items()}
    with hooks_then(network, seen.first.hooks):
        copied = copy_of(network, as_then)
    set_attributes(copied, seen.first.attributes)
    for module in copied.modules():
        if hasattr(module, "sparse"):
            module.sparse = False  # type: ignore[assignment] # the gradient of an embedding; its numbers are the same
        if "_original_forward" in vars(module):  # Accelerate has put a forward in its place that enters autocast
            module.__dict__["forward"] = vars(module)["_original_forward"]
    put_buffers(copied, at.first.buffers)
    return copied


@contextmanager
def without_autocast() -> Iterator[None]:
    """Nothing is cast while it is entered, whatever autocast a network enters by itself."""
    nothing: dict[str, Any] = {"__enter__": lambda self: self, "__exit__": lambda self, *error: None}
    outside = (torch.autocast(device, enabled=False) for device in ("cpu", "cuda"))
    with next(outside), next(outside), mock.patch.multiple(torch.autocast, **nothing):
        yield
