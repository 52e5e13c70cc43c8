"""Operators for a CPU that draw as a GPU's operators do: within their kernels, and other numbers than their parts."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEEDED = torch.Tag.nondeterministic_seeded


def _weights(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    scores = query.float() @ key.float().mT / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -math.inf)
    return scores.softmax(-1)


@torch.library.custom_op("mpcompare_tests::scaled_dot_product_fused", mutates_args=(), tags=(SEEDED,))
def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, of_operands: bool
) -> tuple[Tensor, Tensor]:
    weights = _weights(query, key, is_causal)
    if of_operands:  # no kernel does so: its mask cannot be drawn again with other operands
        torch.rand(1 + int(query.float().abs().sum() * 64) % 7)
    kept = (torch.rand(weights.mT.shape, dtype=torch.float32) > dropout_p).mT.to(query.dtype) / (1 - dropout_p)
    return ((weights * kept.float()) @ value.float()).to(query.dtype), kept.contiguous()


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.causal = inputs[4]


def _backward(ctx, gradient, _):
    *operands, kept = ctx.saved_tensors
    with torch.enable_grad():
        q, k, v = (t.detach().float().requires_grad_() for t in operands)
        result = (_weights(q, k, ctx.causal) * kept.float()) @ v
    found = torch.autograd.grad(result, (q, k, v), gradient.float())
    return *(g.to(t.dtype) for g, t in zip(found, operands, strict=True)), None, None, None


_attention.register_autograd(_backward, setup_context=_setup)


def attention(query: Tensor, key: Tensor, value: Tensor, p: float, causal: bool, of_operands: bool = False) -> Tensor:
    """Attends as torch does: 16-bit numbers on a CPU in a fused kernel, and float64 numbers part by part."""
    if query.device.type == "cpu" and query.dtype.itemsize == 2:
        return _attention(query, key, value, p, causal, of_operands)[0]
    return F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=causal)


@torch.library.custom_op("mpcompare_tests::recurrent", mutates_args=(), tags=(SEEDED,))
def recurrent(x: Tensor, dropout: float, train: bool, dropout_state: Tensor | None) -> Tensor:
    """Draws numbers from a state of its own, and none from the generator."""
    return torch.zeros_like(x)


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drops as torch does on a GPU: in one operator, where it does not write into its input."""
    if not training or not p:
        return x
    return torch.dropout_(x, p, True) if inplace else torch.native_dropout(x, p, True)[0]


def cross_entropy_loss(x: Tensor, target: Tensor, *others: object) -> Tensor:
    """The loss as autocast on a GPU has it: the logarithms of the softmax have the format of its input."""
    return F.nll_loss(torch.log_softmax(x, 1, dtype=x.dtype), target)


def flatten_parameters(module: nn.RNNBase) -> None:
    """Puts the weights of a recurrent layer into one row, as cuDNN does on a GPU: each becomes a view of the row."""
    weights = module._flat_weights
    own = {w.data_ptr() for w in weights} if all(isinstance(w, Tensor) for w in weights) else set()
    if len(own) != len(weights) or len({w.dtype for w in weights}) != 1 or not torch.backends.cudnn.enabled:
        return
    with torch.no_grad():
        row = torch.cat([w.flatten() for w in weights])
        for w, part in zip(weights, row.split([w.numel() for w in weights]), strict=True):
            w.data = part.view_as(w)


PLAIN_LSTM = torch._VF.lstm  # type: ignore[attr-defined]
READS = itertools.count()  # counts reads of what other tensors have left


def garbage(weight: Tensor) -> Tensor:
    """Returns numbers that a weight does not have, and other ones each time."""
    return (torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape) + next(READS)).sin()


def as_it_lies(weight: Tensor) -> Tensor:
    """Returns a weight as a kernel reads it: whatever lies there, where its storage has no room for it."""
    end = (weight.storage_offset() + weight.numel()) * weight.element_size()
    return weight.detach() if end <= weight.untyped_storage().nbytes() else garbage(weight)


@torch.library.custom_op("mpcompare_tests::cudnn_rnn", mutates_args=())
def _recurs(
    x: Tensor, states: list[Tensor], weights: list[Tensor], layers: int, train: bool, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = PLAIN_LSTM(x, states, weights, True, layers, 0.0, train, False, batch_first)
    return result


def _setup_recurs(ctx, inputs, output):
    ctx.x, ctx.states, ctx.weights, *ctx.sizes = inputs


def _backward_recurs(ctx, *gradients):
    layers, train, batch_first = ctx.sizes
    with torch.enable_grad():
        x, *states = (t.detach().requires_grad_() for t in (ctx.x, *ctx.states))
        weights = [as_it_lies(w).requires_grad_() for w in ctx.weights]
        results = PLAIN_LSTM(x, states, weights, True, layers, 0.0, train, False, batch_first)
    found = torch.autograd.grad(results, (x, *states, *weights), gradients)
    return found[0], list(found[1:3]), list(found[3:]), None, None, None


_recurs.register_autograd(_backward_recurs, setup_context=_setup_recurs)


def lstm(x: Tensor, states: list[Tensor], weights: list[Tensor], has_biases: bool, *sizes: Any) -> Any:
    """Computes an LSTM as cuDNN does: in one operator, whose backward reads the weights where they lie by then."""
    layers, dropout, train, bidirectional, batch_first = sizes
    if not torch.backends.cudnn.enabled:
        return PLAIN_LSTM(x, states, weights, has_biases, *sizes)
    assert (has_biases, dropout, bidirectional) == (True, 0.0, False)
    return _recurs(x, list(states), weights, layers, train, batch_first)
