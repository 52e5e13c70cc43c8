"""The dtypes in which each layer of a torch module runs, seen in one step.

Hooks see the tensors that a layer takes and returns. A dispatch mode sees the operators themselves, below autograd
and autocast: under autocast a linear layer that is given fp32 is seen to multiply bf16.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpcompare.backends.layer_dtypes.table import LOSS, LayerDtypes, arithmetic, floating
from mpcompare.contract import Batches, ModuleDtypes, Walk

aten = torch.ops.aten
# Autograd adds up the gradients of several uses of a value, and of the numbers that were chosen of it.
SUMS = {aten.add, aten.add_, aten.index_put, aten.index_put_, aten.index_add, aten.scatter_add, aten.scatter_add_}


class LayerDtypesMode(TorchDispatchMode):
    """Notes in ``dtypes`` the dtypes of one step of ``model``, which is taken while the mode is entered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dtypes = LayerDtypes()
        self.inside: list[tuple[str, int]] = []  # modules being called, and autograd's count before each call
        self.node_of: str | None = None  # the layer whose backward is running
        self.in_loss = False
        self.claimed: set[Any] = set()  # the nodes of the autograd graph whose layer is known
        self.modules = list(model.named_modules())

    def __enter__(self) -> "LayerDtypesMode":
        self.handles = []
        for name, module in self.modules:
            # Before a backend's own hooks, and after them: casts there are part of the layer. Also after an exception:
            # a checkpoint ends its second computation by one.
            called = module.register_forward_pre_hook(partial(self._called, name), prepend=True, with_kwargs=True)
            self.handles += [called, module.register_forward_hook(partial(self._returned, name), always_call=True)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()
        # The nodes' hooks know this mode, and no garbage collector sees that: it would keep the network for good.
        self.claimed.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computed_in = arithmetic(func, (t.dtype for t in floating((args, kwargs))))
        if self.inside:  # also in backward, where a checkpoint computes forward again
            self.dtypes.add(self.inside[-1][0], "computes", computed_in)
        elif self.node_of is not None:
            self.dtypes.add(self.node_of, "backward", computed_in)
        elif self.in_loss and torch.is_grad_enabled():
            self.dtypes.add(LOSS, "computes", computed_in)
        elif self.in_loss and func.overloadpacket not in SUMS:
            self.dtypes.add(LOSS, "backward", computed_in)
        return func(*args, **(kwargs or {}))

    def _called(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.dtypes.add(name, "input", (t.dtype for t in given))
        self.inside.append((name, torch.autograd._get_sequence_nr()))

    def _returned(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        before = self.inside.pop()[1]
        outputs = floating(output)
        self.dtypes.add(name, "output", (t.dtype for t in outputs))
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, name))
                self._claim(name, tensor.grad_fn, before)
        if name == "":
            self.in_loss = True
            self.dtypes.add(LOSS, "input", (t.dtype for t in outputs))

    def _gradient(self, name: str, gradient: Tensor) -> None:
        self.in_loss = False
        self.dtypes.add(name, "gradient", [gradient.dtype])

    def _claim(self, name: str, node: Any, before: int) -> None:
        """Counts the backward of ``node``, and of the nodes made since ``before`` that lead to it, to the layer
        ``name``. Nodes of the layers inside it are claimed already."""
        waiting, met = [node], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in met or not before <= node._sequence_nr() < 2**63:
                continue  # a leaf's node has the largest number that there is
            met.add(node)
            waiting += [following for following, _ in node.next_functions]
            if node not in self.claimed:
                node.register_prehook(partial(self._at, name))
                node.register_hook(partial(self._at, None))
        self.claimed |= met

    def _at(self, name: str | None, *_: Any) -> None:
        self.node_of = name


def layer_dtypes_of_step(
    backend: Any, model: nn.Module, masters: Mapping[str, Tensor], batches: Batches
) -> ModuleDtypes:
    """Lets a backend take a step, and returns the dtypes that are seen until its gradients are there: the table of
    :meth:`mpcompare.contract.Backend.module_dtypes`, from arguments as in :meth:`LayerDtypes.table`."""
    walk = Walk(backend, batches, backend.task.optimizer.lr)
    with LayerDtypesMode(model) as mode:
        walk.through("unscale")
    mode.dtypes.add(LOSS, "output", [walk.finish().dtype])
    return mode.dtypes.table(model, masters)
