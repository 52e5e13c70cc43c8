"""Real bugs of the fourth draw in layers: norms and their statistics, dropout, embeddings, attention, linear and
recurrent layers; and a mask that looks wrong and is right."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.real.fourth_draw_settings import GPT_PADDED, LSTM
from planted.real.norms import WRONG, norms_of
from planted.real.registry import CORRECT, Theme
from planted.real.second_draw_layers import OwnAttention, batch_norm_of, moves_statistics
from planted.real.second_draw_settings import BATCH_NORM_BF16
from planted.real.settings import GPT, LLAMA, MLP, MLP_ADAM
from planted.real.third_draw_settings import GPT_DROPOUT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpcompare.backends.amp import Amp

NORMS, BUFFERS = Theme("norms", draw=4), Theme("buffers", draw=4)
PRECISION, RIGHT = Theme("precision", draw=4), Theme(CORRECT, draw=4)


class _LayerNorm(torch.autograd.Function):
    """LayerNorm whose input gradient subtracts its mean twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        inverse = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        return (x - mean) * inverse * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, inverse = ctx.saved_tensors
        normed, g = (x - mean) * inverse, grad * weight
        along = (g * normed).mean(-1, keepdim=True)
        dx = inverse * (g - 2 * g.mean(-1, keepdim=True) - normed * along)
        rows = tuple(range(grad.dim() - 1))
        return dx, (grad * normed).sum(rows), grad.sum(rows), None


@NORMS.plants("tenstorrent/tt-metal/issues/53204", GPT, "bf16", fair=f"{WRONG}, input gradient", also="tt-metal#53215")
class MeanSubtractedTwice(layers.Patched):
    """The input gradient of LayerNorm subtracts the mean of ``gradient * weight`` twice: a register still held it."""

    def patch(self, model: Any) -> None:
        for norm in norms_of(model):
            norm.forward = lambda x, norm=norm: _LayerNorm.apply(x.float(), norm.weight, norm.bias, norm.eps)


@BUFFERS.plants("bonlime/pytorch-tools/issues/97", BATCH_NORM_BF16, "bf16", fair="running statistics, buffers")
class MomentumOnBothSides(layers.Patched):
    """Running statistics are ``momentum * old + momentum * new``, and not ``(1 - momentum) * old + momentum * new``."""

    def patch(self, model: Any) -> None:
        def move(norm: Any, before: dict[str, Tensor], _: Tensor) -> None:
            for name, old in before.items():
                getattr(norm, name).data.sub_((1 - 2 * norm.momentum) * old)

        moves_statistics(batch_norm_of(model), move)


def dropouts_of(model: nn.Module) -> list[nn.Dropout]:
    return [module for module in model.modules() if isinstance(module, nn.Dropout)]


@PRECISION.plants("kaldi-asr/kaldi/issues/2814", GPT_DROPOUT, "bf16", fair="dropout, forward pass", also="kaldi#2815")
class DividesByThePartDropped(layers.Patched):
    """Dropout divides the numbers that it keeps by p, and not by 1 - p. Here it is the dropout of the blocks: if that
    of the embedding were so, too, norms would make it the same."""

    def patch(self, model: Any) -> None:
        for module in dropouts_of(model.blocks):
            module.forward = lambda x, module=module, right=module.forward: (  # type: ignore[method-assign]
                right(x) * ((1 - module.p) / module.p)
            )


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


@PRECISION.plants("NVIDIA/apex/pull/816", GPT_DROPOUT, "fp16", fair="dropout, input gradient, gradient scaled")
class MultipliesByThePartDropped(layers.Patched):
    """The backward pass of dropout multiplies what was kept by p, and not by 1 / (1 - p). There it is the dropout of
    attention's probabilities, here that of the stream."""

    def patch(self, model: Any) -> None:
        for module in dropouts_of(model):
            module.forward = lambda x, module=module, right=module.forward: (  # type: ignore[method-assign]
                right(_Scaled.apply(x, module.p * (1 - module.p)))
            )


@PRECISION.plants(
    "fartashf/vsepp/issues/4", GPT_DROPOUT, "bf16", fair="dropout, later steps, run", also="mmd#14, clevr-iep#22"
)
class StaysInEvaluation(Amp):
    """A validation in the middle of an epoch leaves the network in evaluation mode: nothing is dropped any more. Here
    it comes after 6 steps."""

    taken = 0

    def update(self) -> None:
        super().update()
        self.taken += 1
        if self.taken == 6:
            self.model.eval()


@PRECISION.plants(
    "lucidrains/vit-pytorch/issues/65",
    LLAMA,
    "bf16",
    fair="attention, forward pass",
    also="ng-video-lecture#6, DL4Proteins-notebooks#12, TMUnet#13",
)
class ScaledByTheWidth(OwnAttention):
    """Scores are divided by the root of the width, and not by that of the channels of a head."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        width = q.shape[1] * q.shape[-1]
        return F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, scale=width**-0.5)


@PRECISION.plants(
    "pytorch/pytorch/issues/26302", GPT_PADDED, "bf16", fair="embedding", also="pytorch#28716, pytorch#3506, torchax#11"
)
class PaddingIsTrained(layers.Patched):
    """The row of padding has a gradient like all others, and does not stay 0."""

    def patch(self, model: Any) -> None:
        model.embedding.padding_idx = None


class _UpdatedFirst(torch.autograd.Function):
    """A linear layer whose weight is updated before its input gradient is taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, lr: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lr = lr
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dw = (grad.t() @ x).float()
        return grad @ (weight - ctx.lr * dw).to(grad.dtype), dw, grad.sum(0).float(), None


@PRECISION.plants("VikParuchuri/zero_to_gpt/issues/12", MLP, "bf16", fair="input gradient")
class UpdatesBeforeItGoesDown(layers.Patched):
    """Each layer's weight is updated before the gradient goes down through it. The learning rate is constant."""

    def patch(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, module=module: _UpdatedFirst.apply(  # type: ignore[method-assign]
                    x.to(self.compute_dtype), module.weight, module.bias, self.task.optimizer.lr
                )


@PRECISION.plants(
    "pytorch/pytorch/issues/7617",
    MLP_ADAM,
    "bf16",
    fair="gradient missing, unused parameter, update left out",
    also="pytorch#6884, pytorch#42212, xtuner#2048",
)
class FirstLayerRecomputed(layers.Patched):
    """The first layer is recomputed in backward, by the reentrant way: its input needs no gradient, so its output needs
    none, and its parameters get none."""

    def patch(self, model: Any) -> None:
        right = model.layer1.forward
        model.layer1.forward = lambda x: self.recomputed(right, x)

    def recomputed(self, run: Any, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output: Tensor = checkpoint(run, x, use_reentrant=True)
        return output


class _Cell(torch.autograd.Function):
    """The step of an LSTM from its gates and its state; backward takes the gates as they were before their activations
    for those after them."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = gates.chunk(4, 1)
        after = f.sigmoid() * c + i.sigmoid() * g.tanh()
        ctx.save_for_backward(gates, c, after)
        return o.sigmoid() * after.tanh(), after

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gates, c, after = ctx.saved_tensors
        i, f, g, o = gates.chunk(4, 1)
        dc = dc + dh * o * (1 - after.tanh().square())
        of_gates = [
            dc * g * i * (1 - i),
            dc * c * f * (1 - f),
            dc * i * (1 - g.square()),
            dh * after.tanh() * o * (1 - o),
        ]
        return torch.cat(of_gates, 1), dc * f


@PRECISION.plants("flagos-ai/FlagGems/issues/5014", LSTM, "bf16", fair="recurrent layer, input gradient")
class GatesBeforeTheirActivations(layers.Patched):
    """The fused cell of an LSTM keeps its gates as they are before sigmoid and tanh; its backward pass takes them for
    the activated ones."""

    def patch(self, model: Any) -> None:
        lstm = model.lstm

        def forward(x: Tensor) -> tuple[Tensor, None]:
            h = c = x.new_zeros(len(x), lstm.hidden_size, dtype=torch.float32)
            outputs = []
            for x_t in x.unbind(1):
                gates = F.linear(x_t, lstm.weight_ih_l0, lstm.bias_ih_l0)
                gates = gates + F.linear(h, lstm.weight_hh_l0, lstm.bias_hh_l0)
                h, c = _Cell.apply(gates.float(), c)
                outputs.append(h)
            return torch.stack(outputs, 1), None

        lstm.forward = forward


@RIGHT.plants("keras-team/keras/pull/17571", LLAMA, "fp16")
class MaskedByALargeNumber(OwnAttention):
    """A token that may not be seen has half of the lowest fp16 number added to its score, and not -inf: its weight is 0
    all the same."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).to(self.compute_dtype)
        later = torch.ones(scores.shape[-2:], dtype=scores.dtype).triu(1)
        masked = scores + later * (torch.finfo(scores.dtype).min / 2)
        return masked.float().softmax(-1) @ v
