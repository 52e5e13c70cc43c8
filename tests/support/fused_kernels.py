"""Operators for a CPU that draw as a GPU's do: within their kernels, and other numbers than their parts draw."""

import math

import torch
from torch import Tensor
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
    """Attends as torch does: numbers of 16 bits on a CPU in a fused kernel, and those of float64 part by part."""
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
