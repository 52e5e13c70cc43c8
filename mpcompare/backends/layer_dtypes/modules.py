"""Where does each precision run? One step of a torch module, layer by layer, in the dtypes in which it happens.

Hooks see what a layer is given and what it hands on. A dispatch mode sees the operators themselves, below autograd and
autocast: under autocast a linear layer that is given fp32 is seen to multiply bf16.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpcompare.contract import ModuleDtypes
from mpcompare.dtypes import dtype_name
from mpcompare.tasks.mlp import PlainMlp
from mpcompare.tasks.task import Params

LOSS = "(loss)"  # the row of all that lies between the network's output and its gradient
WHAT = ("master", "weight", "input", "computes", "output", "gradient", "backward")
aten = torch.ops.aten
# Operators that fill, copy and cast, and so compute nothing; views are left out as well.
MOVES = {
    *(aten._to_copy, aten.copy_, aten.copy, aten.clone, aten.lift_fresh, aten._unsafe_view, aten.cat, aten.stack),
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.full, aten.fill_),
    *(aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero_, aten.ones, aten.ones_like, aten.full_like),
    torch.ops.prims.convert_element_type,
}


def arithmetic(op: Any, operands: Iterable[torch.dtype]) -> set[torch.dtype]:
    """The dtypes in which an operator computes: those of its operands, of a pointwise one the widest, to which torch
    promotes the others. Empty if it computes nothing. What a kernel keeps inside, such as fp32 sums of 16-bit products,
    nobody sees from outside.

    Args:
        operands: dtypes of its tensors, but scalars.
    """
    if not isinstance(op, torch._ops.OpOverload) or op.is_view or op.overloadpacket in MOVES:
        return set()
    found = {dtype for dtype in operands if dtype.is_floating_point}
    pointwise = torch.Tag.pointwise in op.tags
    return {max(found, key=lambda dtype: dtype.itemsize)} if pointwise and found else found


def floating(values: Any) -> list[Tensor]:
    """The floating tensors in ``values``, but scalars, which take on the others' dtype."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point() and t.dim()]


def joined(dtypes: Iterable[torch.dtype]) -> str:
    """``fp32``; ``fp32+bf16`` where there are several; ``-`` where there is none."""
    each = sorted(set(dtypes), key=lambda dtype: (-dtype.itemsize, str(dtype)))
    return "+".join(map(dtype_name, each)) or "-"


class Seen:
    """Sets of dtypes by layer and by what they are of, in the order in which the layers are called first."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, set[torch.dtype]]] = {}

    def add(self, layer: str, what: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        self.rows.setdefault(layer, {}).setdefault(what, set()).update(dtypes)

    def table(self, model: nn.Module, masters: Mapping[str, Tensor]) -> ModuleDtypes:
        """As the contract has it: a row for each layer, for a module of layers that computes something itself, and for
        the loss.

        Args:
            model: the module that was seen, with the weights that it computes with.
            masters: what the optimizer updates, under the names of the parameters.
        """
        modules = dict(model.named_modules())
        found: ModuleDtypes = {}
        for name, row in self.rows.items():
            module = modules.get(name)
            if module is not None and any(True for _ in module.children()) and not row.get("computes"):
                continue
            own = {} if module is None else dict(module.named_parameters(name, recurse=False))
            found[name] = {
                "kind": "loss" if module is None else type(module).__name__,
                "master": joined(masters[p].dtype for p in own if p in masters),
                "weight": joined(p.dtype for p in own.values()),
                **{what: joined(row.get(what, ())) for what in WHAT[2:]},
            }
        return found


class Watch(TorchDispatchMode):
    """Sees one step of ``model`` while it is entered; ``seen`` is what it has seen."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen = Seen()
        self.inside: list[tuple[str, int]] = []  # the modules that are being called, and autograd's count before each
        self.node_of: str | None = None  # the layer whose backward is running
        self.in_loss = False
        self.claimed: set[Any] = set()  # nodes of the autograd graph that are known to be a layer's
        self.modules = list(model.named_modules())

    def __enter__(self) -> "Watch":
        self.handles = []
        for name, module in self.modules:
            # Before a backend's own hooks, and after them: casts there are part of the layer. Also after an exception,
            # by which a checkpoint ends what it computes again.
            called = module.register_forward_pre_hook(self._called(name), prepend=True, with_kwargs=True)
            self.handles += [called, module.register_forward_hook(self._returned(name), always_call=True)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = arithmetic(func, (t.dtype for t in floating((args, kwargs))))
        if self.inside:  # also in backward, where a checkpoint computes forward again
            self.seen.add(self.inside[-1][0], "computes", found)
        elif self.node_of is not None:
            self.seen.add(self.node_of, "backward", found)
        elif self.in_loss:
            self.seen.add(LOSS, "computes" if torch.is_grad_enabled() else "backward", found)
        return func(*args, **(kwargs or {}))

    def _called(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.seen.add(name, "input", (t.dtype for t in given))
            self.inside.append((name, torch.autograd._get_sequence_nr()))

        return hook

    def _returned(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            before = self.inside.pop()[1]
            outputs = floating(output)
            self.seen.add(name, "output", (t.dtype for t in outputs))
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient(name))
                    self._claim(name, tensor.grad_fn, before)
            if name == "":
                self.in_loss = True
                self.seen.add(LOSS, "input", (t.dtype for t in outputs))

        return hook

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.in_loss = False
            self.seen.add(name, "gradient", [gradient.dtype])

        return hook

    def _claim(self, name: str, node: Any, before: int) -> None:
        """Marks the nodes that were made since ``before`` and lead to ``node``, but those of layers inside: their
        backward is the layer's."""
        waiting, met = [node], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in met or not before <= node._sequence_nr() < 2**63:
                continue  # a leaf's node has the largest number that there is
            met.add(node)
            waiting += [following for following, _ in node.next_functions]
            if node not in self.claimed:
                node.register_prehook(self._at(name))
                node.register_hook(self._at(None))
        self.claimed |= met

    def _at(self, name: str | None) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.node_of = name

        return hook


def watch(model: nn.Module, masters: Mapping[str, Tensor], step: Callable[[], Tensor]) -> ModuleDtypes:
    """What ``step``, a training step of ``model`` that returns the loss, is seen to do.

    Args:
        model: with the weights that it computes with.
        masters: what the optimizer updates, under the names of the parameters.
    """
    with Watch(model) as observer:
        loss = step()
    observer.seen.add(LOSS, "output", [loss.dtype])
    return observer.seen.table(model, masters)


def mlp_dtypes(
    mlp: PlainMlp,
    masters: Params,
    params: Params,
    z: Sequence[torch.dtype],
    grads: Params,
    loss: Mapping[str, torch.dtype],
) -> ModuleDtypes:
    """The rows of an MLP by hand, from the tensors of a step; relu is part of its layer.

    Args:
        masters, params: ``W1, b1, ...``: what the optimizer updates, and the copies that are multiplied.
        z: of what is given to each layer, and of the output.
        grads: as the products made them; that of a bias is a sum of its layer's ``da``, in the dtype of that.
        loss: the row of the loss, as far as it is seen.
    """
    rows: ModuleDtypes = {}
    for number, layer in enumerate(mlp.layers, start=1):
        W, given, da = params[f"W{number}"].dtype, z[number - 1], grads[f"b{number}"].dtype
        row = {
            "master": [masters[f"W{number}"].dtype, masters[f"b{number}"].dtype],
            "weight": [W, params[f"b{number}"].dtype],
            "input": [given],
            "computes": [given, W],
            "output": [z[number]],
            "gradient": [da],
            "backward": [given, W, da],
        }
        rows[layer] = {"kind": "Linear", **{what: joined(dtypes) for what, dtypes in row.items()}}
    known = {what: joined([loss[what]] if what in loss else []) for what in WHAT}
    return {**rows, LOSS: {"kind": "loss", **known}}
