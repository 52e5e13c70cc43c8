"""The table of dtypes by layer, and the conditions under which an operator or a tensor counts in it.

The table of an MLP that is computed by hand is read from the tensors of a step: there is no module to look into.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpcompare.contract import ModuleDtypes
from mpcompare.dtypes import dtype_name
from mpcompare.fields import LOSS as LOSS
from mpcompare.tasks.mlp import PlainMlp
from mpcompare.tasks.task import Params

COLUMNS = ("master", "weight", "input", "computes", "output", "gradient", "backward")
aten = torch.ops.aten
# Operators that fill, copy, choose and cast, and so compute nothing; views are left out as well.
MOVES = {
    *(aten._to_copy, aten.copy_, aten.copy, aten.clone, aten.lift_fresh, aten._unsafe_view, aten.cat, aten.stack),
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.full, aten.fill_),
    *(aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero_, aten.ones, aten.ones_like, aten.full_like),
    *(aten.slice_backward, aten.select_backward, aten.slice_scatter, aten.select_scatter, aten.constant_pad_nd),
    *(aten.index, aten.index_select, aten.gather),
    torch.ops.prims.convert_element_type,
}


def arithmetic(op: Any, operands: Iterable[torch.dtype]) -> set[torch.dtype]:
    """Returns the dtypes in which an operator computes; empty if it computes nothing.

    They are the dtypes of its ``operands``, scalars left out; of a pointwise operator the widest one, to which torch
    promotes the others. The dtypes inside of a kernel, such as fp32 for its sums of 16-bit products, cannot be seen
    from outside.
    """
    if not isinstance(op, torch._ops.OpOverload) or op.is_view or op.overloadpacket in MOVES:
        return set()
    dtypes = {dtype for dtype in operands if dtype.is_floating_point}
    pointwise = torch.Tag.pointwise in op.tags
    return {max(dtypes, key=lambda dtype: dtype.itemsize)} if pointwise and dtypes else dtypes


def floating(values: Any) -> list[Tensor]:
    """Returns the floating tensors in ``values``, without scalars, which take on the others' dtype."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point() and t.dim()]


def joined(dtypes: Iterable[torch.dtype]) -> str:
    """Returns a cell: ``fp32``; ``fp32+bf16`` where there are several dtypes; ``-`` where there is none."""
    each = sorted(set(dtypes), key=lambda dtype: (-dtype.itemsize, str(dtype)))
    return "+".join(map(dtype_name, each)) or "-"


class LayerDtypes:
    """Sets of dtypes by layer and column, the layers in the order in which they are called first."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, set[torch.dtype]]] = {}

    def add(self, layer: str, column: str, dtypes: Iterable[torch.dtype] = ()) -> None:
        """Adds dtypes to a cell; without any, the layer gets a row all the same."""
        self.rows.setdefault(layer, {}).setdefault(column, set()).update(dtypes)

    def table(self, model: nn.Module, masters: Mapping[str, Tensor]) -> ModuleDtypes:
        """Returns the table of :meth:`mpcompare.contract.Backend.module_dtypes`: a row for each layer, for each module
        of layers that computes something itself, and for the loss.

        Args:
            model: the module whose step was seen, with the weights that it computes with.
            masters: the parameters that the optimizer updates, under the names of the model's.
        """
        modules = dict(model.named_modules())
        table: ModuleDtypes = {}
        for name, row in self.rows.items():
            module = modules.get(name)
            if module is not None and any(True for _ in module.children()) and not row.get("computes"):
                continue
            own = {} if module is None else dict(module.named_parameters(name, recurse=False))
            table[name] = {
                "kind": "loss" if module is None else type(module).__name__,
                "master": joined(masters[p].dtype for p in own if p in masters),
                "weight": joined(p.dtype for p in own.values()),
                **{column: joined(row.get(column, ())) for column in COLUMNS[2:]},
            }
        return table


def layer_dtypes_of_mlp(
    mlp: PlainMlp,
    masters: Params,
    params: Params,
    z: Sequence[torch.dtype],
    grads: Params,
    loss: Mapping[str, torch.dtype],
) -> ModuleDtypes:
    """Returns the table of :meth:`mpcompare.contract.Backend.module_dtypes`; relu is part of its layer.

    Args:
        masters, params: ``W1, b1, ...``: the parameters that the optimizer updates, and the copies that are multiplied.
        z: dtypes of the inputs of each layer, and of the output.
        grads: the gradients as the products made them; the gradient of a bias is a sum of its layer's ``da``, in the
            same dtype.
        loss: the cells of the loss that are known.
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
        rows[layer] = {"kind": "Linear", **{column: joined(dtypes) for column, dtypes in row.items()}}
    of_loss = {column: joined([loss[column]] if column in loss else []) for column in COLUMNS}
    return {**rows, LOSS: {"kind": "loss", **of_loss}}
