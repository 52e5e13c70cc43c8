"""The random numbers that a network draws in a step, such as the masks of dropout.

A network draws them from torch's generators. Set to one seed before a step, the generators give the same numbers to
every backend that asks in the network's own order, whatever its precision: on a CPU a mask does not depend on its dtype
(checked by tests/tasks/test_draws.py). The state in which a forward pass leaves the generators tells whether a backend
asked for the same numbers. ``torch.compile`` draws numbers of its own.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompare import generators
from mpcompare.generators import CPU, DeviceGenerator, fingerprint
from mpcompare.tasks.copies import copy_of

EXAMINED = 0  # the number of every step that is examined: it has the masks of the oracle


def seed_step(number: int, seed: int = 0) -> None:
    """Sets torch's generators, on all devices, as they are before the step of this number in a run of this seed.

    Python's and numpy's generators stay as they are.
    """
    generators.seed(zlib.crc32(f"{seed} {number}".encode()))


@contextmanager
def as_examined(device: torch.device) -> Iterator[None]:
    """Sets torch's generators as they are before an examined step, and puts them back when it ends."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_step(EXAMINED)
        yield


def state(device: torch.device) -> str:
    """Returns the state of torch's generators, as far as a step on ``device`` draws from them, as a short text."""
    devices = [CPU, device] if device.type == "cuda" else [CPU]
    return " ".join(f"{fingerprint(DeviceGenerator(each).get()):08x}" for each in devices)


def draws(call: Callable[[], object], device: torch.device) -> bool:
    """Returns whether ``call`` draws from torch's generators."""
    before = state(device)
    call()
    return state(device) != before


class _Random(TorchDispatchMode):
    """Notes the names of random operators while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def random_operators(call: Callable[[], object]) -> set[str]:
    """Returns the names of the operators that ``call`` draws random numbers by."""
    with torch.no_grad(), _Random() as noted:
        call()
    return noted.names


def masks_depend_on_dtype(device: torch.device) -> bool:
    """Returns whether dropout keeps other elements of a tensor in 16 bits than in fp32, from the same seed."""
    with as_examined(device):
        for elements in (1 << 10, 1 << 16):
            kept = []
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                seed_step(EXAMINED)
                kept.append(F.dropout(torch.ones(elements, dtype=dtype, device=device), 0.5) != 0)
            if not all(torch.equal(kept[0], each) for each in kept):
                return True
    return False


def masks_are_shared(network: nn.Module, x: Any) -> bool:
    """Returns whether every mask that a network draws for ``x`` is the same one whatever its dtype. A mask of
    :class:`MaskedDropout` always is; any other mask is unless :func:`masks_depend_on_dtype`."""
    if not masks_depend_on_dtype(x.device):
        return True
    network = copy_of(network)
    for module in network.modules():
        if isinstance(module, MaskedDropout):
            module.eval()
    with torch.no_grad():
        return not draws(lambda: network(x), x.device)


class MaskedDropout(nn.Dropout):
    """``nn.Dropout`` whose mask is drawn in fp32 whatever the input's dtype, by an operator that ``torch.compile``
    calls as it is: all backends draw the same masks from the same seed."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not 0 < self.p < 1:
            return F.dropout(input, self.p, self.training)
        return input * _kept(input.detach(), self.p).to(input.dtype).div_(1 - self.p)


@torch.library.custom_op("mpcompare::kept", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _kept(x: Tensor, p: float) -> Tensor:
    """Returns 1 for each element of ``x`` that is kept and 0 for each that is dropped, in fp32."""
    return torch.empty(x.shape, device=x.device).bernoulli_(1 - p)


@_kept.register_fake
def _(x: Tensor, p: float) -> Tensor:
    return torch.empty(x.shape, device=x.device)


def with_shared_masks(model: nn.Module) -> nn.Module:
    """Returns a copy of a network whose masks all backends share: :class:`MaskedDropout` stands in the place of each
    ``nn.Dropout``. A network without dropout is returned as it is.

    A class that somebody derived from ``nn.Dropout`` stays, and so does a function that a ``forward`` calls by itself.
    """
    if not any(type(module) is nn.Dropout and module.p > 0 for module in model.modules()):
        return model
    model = copy_of(model)
    _exchange(model, nn.Dropout, MaskedDropout)
    return model


def without_masks(model: nn.Module) -> int:
    """Puts ``nn.Dropout`` back, and returns how many."""
    return _exchange(model, MaskedDropout, nn.Dropout)


def _exchange(model: nn.Module, one: type[nn.Dropout], other: type[nn.Dropout]) -> int:
    new = {m: other(m.p).train(m.training) for m in model.modules() if type(m) is one and m.p > 0}
    for parent in list(model.modules()):
        parent._modules.update({name: new[m] for name, m in parent._modules.items() if m in new})
    return len(new)
