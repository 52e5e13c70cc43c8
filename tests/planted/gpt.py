"""Planted bugs in the training of a transformer."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.registry import BF16, BOTH, Family
from support.tasks import part
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.text import ALPHABET, topics
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt


def make(tied: bool = False) -> tuple[Task, Dataset]:
    """Returns the task of a transformer, whose last layer shares the embedding's weight if ``tied``."""
    model = partial(CharGpt, len(ALPHABET), 24, 32, 4, 2, tied)
    return Task(model, "cross_entropy", Sgd(0.1, 0.9), 32), part(topics(0, 24), 640)


GPT = Family("gpt", make, steps=12, precisions=BF16)


class AttentionByHand(layers.Patched):
    """``amp`` with a softmax by hand in the first block's attention, so that bugs fit inside."""

    diagonal = 1  # tokens from this far on are hidden
    power = 0.5  # the power of the width by which products are divided

    def patch(self, model: Any) -> None:
        attention = model.blocks[0].attention

        def forward(x: Tensor) -> Tensor:
            n, t, width = x.shape
            q, k, v = attention.qkv(x).view(n, t, 3, attention.heads, -1).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-2, -1)).float() / (width // attention.heads) ** self.power
            hidden = torch.ones(t, t, dtype=torch.bool).triu(self.diagonal)
            hidden[:, 0] = False
            mixed = self.probabilities(scores.masked_fill(hidden, -math.inf)).to(v.dtype) @ self.values(v)
            return attention.output(mixed.transpose(1, 2).reshape(n, t, width))

        attention.forward = forward

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def values(self, v: Tensor) -> Tensor:
        return v


@GPT.plants("forward pass")
class MaskOffByOne(AttentionByHand):
    """Each token sees the next one, which is the one to be predicted."""

    diagonal = 2


@GPT.plants("forward pass")
class ScoresNotDividedByTheRoot(AttentionByHand):
    power = 1.0


@GPT.plants("attention")
class ProbabilitiesDetached(AttentionByHand):
    """No gradient passes through the softmax."""

    def probabilities(self, scores: Tensor) -> Tensor:
        return super().probabilities(scores).detach()


GPT.plants("attention", name="ValuesDetached")(layers.variant(AttentionByHand, values=lambda _, v: v.detach()))


@GPT.plants("attention")
class SoftmaxGradientWithoutItsMean(AttentionByHand):
    """Backward of the softmax is p dp, where p (dp - sum p dp) is right."""

    def probabilities(self, scores: Tensor) -> Tensor:
        p = super().probabilities(scores)
        return p.detach() * (1 + scores.masked_fill(scores.isinf(), 0) - scores.masked_fill(scores.isinf(), 0).detach())


@GPT.plants("forward pass")
class ScoresSoftCapped(AttentionByHand):
    """Scores are bent to stay within 20, as Gemma's within 50, which changes nothing where they are next to 0."""

    def probabilities(self, scores: Tensor) -> Tensor:
        capped = 20 * (scores / 20).tanh()
        return capped.masked_fill(scores.isinf(), -math.inf).softmax(-1)


@GPT.plants("forward pass")
class LogitsSoftCapped(layers.Patched):
    """Logits are bent to stay within 30, as Gemma's."""

    def patch(self, model: Any) -> None:
        model.output.register_forward_hook(lambda _, __, output: 30 * (output / 30).tanh())


@GPT.plants("forward pass")
class ActivationsSaturate(layers.Patched):
    """The output of the first block's wide layer is cut off at 6."""

    def patch(self, model: Any) -> None:
        model.blocks[0].up.register_forward_hook(lambda _, __, output: output.clamp(max=6))


@GPT.plants("input gradient")
class ResidualGradientMissing(layers.Patched):
    """The stream of residuals passes no gradient by the second block's network."""

    def patch(self, model: Any) -> None:
        block = model.blocks[1]

        def forward(x: Tensor) -> Tensor:
            x = x + block.attention(block.norm1(x))
            return x.detach() + block.down(block.gelu(block.up(block.norm2(x))))

        block.forward = forward


@GPT.plants("normalization")
class NormGradientAsIfConstant(layers.Patched):
    """Backward of the last norm takes mean and variance for constants."""

    def patch(self, model: Any) -> None:
        norm = model.norm

        def forward(x: Tensor) -> Tensor:
            x = x.float()
            mean, var = x.detach().mean(-1, keepdim=True), x.detach().var(-1, unbiased=False, keepdim=True)
            return (x - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias

        norm.forward = forward


@GPT.plants("normalization")
class NormWeightsSummedIn16Bits(Amp):
    """The gradient of a norm's weight is a sum of products over all tokens, taken in 16 bits."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        norm = self.model.norm

        def hook(module: Any, args: tuple[Tensor], output: Tensor) -> None:
            normed = F.layer_norm(args[0].detach().float(), norm.normalized_shape).flatten(0, -2)
            output.register_hook(lambda g: self.sum_up(g.float().flatten(0, -2) * normed))

        handle = norm.register_forward_hook(hook)
        loss = super().forward(x, y)
        handle.remove()
        return loss

    def sum_up(self, rows: Tensor) -> None:
        self.total = layers.running_sum(rows, self.compute_dtype)

    def backward(self) -> None:
        super().backward()
        self.model.norm.weight.grad.copy_(self.total)


@GPT.plants("normalization", precisions=BOTH)
class NormsWithoutEps(layers.Patched):
    """The norms divide by the root of the variance, without eps. Only a row of padding shows it."""

    def patch(self, model: Any) -> None:
        for norm in (model.norm, *(block.norm1 for block in model.blocks)):
            norm.eps = 0.0


@GPT.plants("normalization", precisions=BOTH)
class NormGradientDividesByZero(layers.Patched):
    """The last norm adds an eps outside of the root of the variance, so that it is nearly the same function. But in a
    row of padding the derivative of the root is 1 / 0."""

    def patch(self, model: Any) -> None:
        norm = model.norm

        def forward(x: Tensor) -> Tensor:
            x = x.float()
            centred = x - x.mean(-1, keepdim=True)
            root = centred.square().mean(-1, keepdim=True).sqrt()
            return centred / (root + norm.eps / (2 * root.detach().clamp(min=norm.eps))) * norm.weight + norm.bias

        norm.forward = forward


GPT.plants("normalization")(layers.variant(layers.WrongEps, norm="norm"))
GPT.plants("gradient missing", name="PositionsGradientDropped")(
    layers.variant(layers.GradientMissing, parameter="positions.weight")
)
GPT.plants("embedding")(layers.EmbeddingSummedIn16Bits)


@GPT.plants("gradient missing", task={"tied": True})
class TiedGradientCountedOnce(layers.Patched):
    """The weight that the last layer shares with the embedding gets the gradient of the last layer alone."""

    def patch(self, model: Any) -> None:
        model.embedding.forward = lambda ids: F.embedding(ids, model.embedding.weight.detach())


@GPT.plants("gradient scaled")
class BlockGradientScaled(Amp):
    """The gradients of one block are accumulated twice."""

    def backward(self) -> None:
        super().backward()
        for p in self.model.blocks[0].parameters():
            p.grad *= 2


@GPT.plants("input gradient")
class GeluGradientOfRelu(layers.Patched):
    """Backward of GELU is ReLU's backward."""

    def patch(self, model: Any) -> None:
        gelu = model.blocks[1].gelu
        gelu.forward = lambda x: F.gelu(x).detach() + F.relu(x) - F.relu(x).detach()


@GPT.plants("gradient missing")
class BlockDetached(layers.Patched):
    """The first block's stream is cut: the layers below get no gradient."""

    def patch(self, model: Any) -> None:
        model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].detach(),))


GPT.plants("loss", name="GptLossIn16Bits")(layers.LossIn16Bits)
GPT.plants("loss")(layers.LabelsShifted)
GPT.plants("update left out", name="BlockNotUpdated")(layers.variant(layers.NotUpdated, layer="blocks.1.up"))
GPT.plants("no master weights", name="LayerWithoutMasters")(layers.variant(layers.RoundedWeights, layer="blocks.1.up"))
# The last layer passes each token's gradient down to the next token.
GPT.plants("input gradient", name="HeadGradientTooLate")(
    layers.variant(layers.WrongInputGradient, layer="output", wrong=lambda _, g: g.roll(1, dims=1))
)
