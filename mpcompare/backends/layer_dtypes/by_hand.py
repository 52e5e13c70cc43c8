"""The dtypes of an MLP that is computed by hand, read from the tensors of a step: there is no module to look into."""

from collections.abc import Mapping, Sequence

import torch

from mpcompare.backends.layer_dtypes.table import COLUMNS, LOSS, joined
from mpcompare.contract import ModuleDtypes
from mpcompare.tasks.mlp import PlainMlp
from mpcompare.tasks.task import Params


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
