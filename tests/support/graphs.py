"""CUDA graphs on a CPU: a stand-in for ``mpcompare.native.graph.capture`` that fails where a graph would go wrong.

As on a GPU a capture has no effect, and a replay repeats the operators that were captured, on the same tensors and with
the same numbers from the host. So whatever a step decides on the host (a Python number that changes, a branch not
taken, a tensor made outside and replaced) is frozen, and reading a value on the host raises.

What it cannot show: memory of the graph's pool that is used again (here every tensor keeps its own), streams, and
values that the host reads without an operator (``Tensor.numpy()``, ``Tensor.tolist()``).
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpcompare.backends import fused
from mpcompare.native import graph


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that ``op`` writes by its schema: ``Tensor(a!)``, also in a list."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


class Recorder(TorchDispatchMode):
    """Records every operator that runs inside of it, this project's own included, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any], list[Tensor | None]]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # storages, and copies

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "profiler":
            return op(*args, **kwargs)
        for tensor in _written(op, args, kwargs):
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        results = op(*args, **kwargs)
        if any(not isinstance(leaf, Tensor) and leaf is not None for leaf in tree_leaves(results)):
            raise RuntimeError(f"{op} gives the host a value: a graph cannot be captured")
        taken = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        # None: the result is an argument or a view of one, and holds the right values already.
        own = [None if r.untyped_storage().data_ptr() in taken else r for r in _tensors(results)]
        self.calls.append((op, args, kwargs, own))
        return results

    def undo(self) -> None:
        """Gives every tensor that was written its former values."""
        for storage, before in self.before.values():
            storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeats every operator; new tensors are written over the tensors that it made at first."""
        for op, args, kwargs, own in self.calls:
            for first, new in zip(own, _tensors(op(*args, **kwargs)), strict=True):
                if first is not None:
                    first.copy_(new)


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Captures ``step`` as ``mpcompare.native.graph.capture`` does, on a CPU."""
    recorder = Recorder()
    with recorder:
        step()
    recorder.undo()
    return recorder.replay


@pytest.fixture
def recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets backends that need CUDA graphs work on a CPU, warmed up and captured as on a GPU."""
    monkeypatch.setattr(graph, "capture", record)
    monkeypatch.setattr(graph, "warm_up", lambda step: step())
    for module in (graph, fused):
        monkeypatch.setattr(module, "require_cuda", lambda device, backend: None)
