"""The memory that an examination will take, foretold before training begins; and what it took.

It is the sum of the tensors that are live in the fullest pass: most of them are as large as all parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from mpcompare.entrant.setup import Setup
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.precision import PRECISIONS

CGROUPS = (  # version 2 and 1: the limit, and what is used of it
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
ROWS = 4  # of a batch, which tell how many numbers its layers put out
SMALL = 100e6  # bytes of all that does not grow with the network: what the passes import, write and cache


@dataclass(frozen=True)
class Sizes:
    """The sizes that an examination depends on, in bytes of fp32.

    Attributes:
        params: all parameters.
        moments: everything that the optimizer remembers of them.
        layer: the parameters of the largest layer.
        outputs: of all layers for a micro-batch.
        data: the data set.
        narrow: whether the step computes in 16 bits, of which it has copies of the parameters.
        aged: whether a backend loads an aged state, beside another one.
        clipped: whether gradients are clipped.
    """

    params: int
    moments: int
    layer: int
    outputs: int
    data: int
    narrow: bool
    aged: bool
    clipped: bool

    @classmethod
    def of(cls, setup: Setup) -> "Sizes":
        """Returns those of a network and its task. The network is called with a few rows."""
        model, task = setup.model, setup.task
        own = [sum(p.nbytes for p in module.parameters(recurse=False)) for module in model.modules()]
        state = task.optimizer.initial_state(torch.zeros(1))
        params = sum(p.nbytes for p in model.parameters())
        return cls(
            params=params,
            moments=params * len(state.keys() - {"step"}),
            layer=max(own),
            outputs=_outputs(model, next(setup.batches())[0][0]),
            data=sum(t.nbytes for t in vars(setup.dataset).values() if isinstance(t, Tensor)),
            narrow=PRECISIONS[setup.precision].is_16_bit,
            aged="step" in state or isinstance(setup.loss_scale, DynamicLossScale),
            clipped=task.clip_norm is not None,
        )

    def backend(self) -> float:
        """Returns the bytes of a backend between two steps."""
        return self.params * (1.5 if self.narrow else 1) + self.moments

    def needed(self) -> float:
        """Returns the bytes that an entrant and the process of its oracle take at their fullest, beyond those of their
        libraries."""
        p = self.params
        rest = self.data + p + self.backend()  # the initial weights, and the backend that was trained
        # The network, its copy in float64, the gradients in float64, and what autograd keeps.
        oracle = p + 2 * p + 2 * p + 4 * self.outputs
        copies = p * (3 + self.clipped)  # of the weights before a step, and of gradients; and the backend's gradients
        first = self.backend() + copies
        aged = 2 * self.backend() + self.moments + copies if self.aged else 0
        last = p + self.backend() + 2 * p  # the network as it was trained, a new backend, the gradients of both
        reload = 2 * self.backend() + p * (2 + self.clipped) + self.moments
        # Inputs, outputs and gradients of each layer are recorded, and once more in float64. One layer has operands,
        # gradients and what is made of both in float64: eight tensors as large as its parameters.
        replay = p + self.backend() + 16 * self.layer + 12 * self.outputs
        return SMALL + rest + max(p + max(first, aged, last, reload, replay), oracle)


def check(setup: Setup) -> int | None:
    """Returns the bytes that the examination of a run on a CPU is foretold to take; None on another device.

    Raises:
        InputError: the machine has not that much.
    """
    if setup.device.type != "cpu":
        return None
    needed, there = int(Sizes.of(setup).needed()), available()
    if needed > there:
        raise InputError(
            "verdict.enabled",
            "true",
            f"the examination needs {needed / 1e9:.1f} GB of memory, and {there / 1e9:.1f} GB are available: "
            "verdict.enabled=false leaves it out, a smaller task.batch_size or a smaller network needs less",
        )
    return needed


def available() -> int:
    """Returns the bytes that a process can have: of the machine, and of the control group that it is in."""
    there = int(psutil.virtual_memory().available)
    for limit, used in CGROUPS:
        try:
            there = min(there, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or one without a limit
            continue
    return max(there, 0)


def _outputs(model: nn.Module, x: Tensor) -> int:
    """Returns the bytes in fp32 of the outputs of all layers for a micro-batch."""
    few, elements = x[:ROWS], 0

    def count(module: nn.Module, given: Any, output: Any) -> None:
        nonlocal elements
        tensors = output if isinstance(output, tuple) else (output,)
        elements += sum(t.numel() for t in tensors if isinstance(t, Tensor))

    layers = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_hook(count) for module in layers]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(few)
    finally:
        for handle in handles:
            handle.remove()
        _restore(model, buffers)
    return 4 * elements * len(x) // len(few)


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, b in model.named_buffers():
        b.copy_(buffers[name])
