"""Planted bugs in the training of a transformer."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from planted.registry import LossIn16Bits, NotUpdated, Patched, RoundedWeights, plants, spoil_input_gradient
from torch import Tensor

from mpcompare.backends.amp import Amp


class AttentionByHand(Patched):
    """The first block's attention with a softmax of its own, so that its inside can be spoilt."""

    diagonal = 1  # tokens from this far on are hidden
    power = 0.5  # of the width by which products are divided

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


@plants("gpt", "forward pass")
class MaskOffByOne(AttentionByHand):
    """Each token sees the next one, which is the one to be told."""

    diagonal = 2


@plants("gpt", "forward pass")
class ScoresNotDividedByTheRoot(AttentionByHand):
    power = 1.0


@plants("gpt", "attention")
class ProbabilitiesDetached(AttentionByHand):
    """No gradient passes through the softmax."""

    def probabilities(self, scores: Tensor) -> Tensor:
        return super().probabilities(scores).detach()


@plants("gpt", "attention")
class ValuesDetached(AttentionByHand):
    def values(self, v: Tensor) -> Tensor:
        return v.detach()


@plants("gpt", "attention")
class SoftmaxGradientWithoutItsMean(AttentionByHand):
    """Backward of the softmax is p dp, where p (dp - sum p dp) is right."""

    def probabilities(self, scores: Tensor) -> Tensor:
        p = super().probabilities(scores)
        return p.detach() * (1 + scores.masked_fill(scores.isinf(), 0) - scores.masked_fill(scores.isinf(), 0).detach())


@plants("gpt", "input gradient")
class ResidualGradientMissing(Patched):
    """The stream of residuals passes no gradient by the second block's network."""

    def patch(self, model: Any) -> None:
        block = model.blocks[1]

        def forward(x: Tensor) -> Tensor:
            x = x + block.attention(block.norm1(x))
            return x.detach() + block.down(block.gelu(block.up(block.norm2(x))))

        block.forward = forward


@plants("gpt", "normalization")
class NormGradientAsIfConstant(Patched):
    """Backward of the last norm takes mean and variance for constants."""

    def patch(self, model: Any) -> None:
        norm = model.norm

        def forward(x: Tensor) -> Tensor:
            x = x.float()
            mean, var = x.detach().mean(-1, keepdim=True), x.detach().var(-1, unbiased=False, keepdim=True)
            return (x - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias

        norm.forward = forward


@plants("gpt", "normalization")
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
        self.total = torch.zeros(rows.shape[1], dtype=self.compute_dtype)
        for row in rows.to(self.compute_dtype):
            self.total += row

    def backward(self) -> None:
        super().backward()
        self.model.norm.weight.grad.copy_(self.total)


@plants("gpt", "forward pass")
class WrongEps(Patched):
    def patch(self, model: Any) -> None:
        model.norm.eps = 0.1


@plants("gpt", "gradient missing")
class PositionsGradientDropped(Amp):
    def backward(self) -> None:
        super().backward()
        self.model.positions.weight.grad = None


@plants("gpt", "embedding")
class EmbeddingSummedIn16Bits(Patched):
    """Each token's gradients are added one after another in 16 bits."""

    def patch(self, model: Any) -> None:
        class Lookup(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
                ctx.save_for_backward(ids)
                ctx.shape = weight.shape
                return weight[ids]

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
                (ids,) = ctx.saved_tensors
                total = torch.zeros(ctx.shape, dtype=torch.bfloat16)
                for token, g in zip(ids.flatten().tolist(), grad.flatten(0, 1).bfloat16(), strict=True):
                    total[token] += g
                return total.float(), None

        model.embedding.forward = lambda ids: Lookup.apply(model.embedding.weight, ids)


@plants("gpt", "embedding", task="tied")
class TiedGradientCountedOnce(Patched):
    """The weight that the last layer shares with the embedding gets the gradient of the last layer alone."""

    def patch(self, model: Any) -> None:
        model.embedding.forward = lambda ids: F.embedding(ids, model.embedding.weight.detach())


@plants("gpt", "gradient scaled")
class BlockGradientScaled(Amp):
    """Accumulated twice in one block."""

    def backward(self) -> None:
        super().backward()
        for p in self.model.blocks[0].parameters():
            p.grad *= 2


@plants("gpt", "input gradient")
class GeluGradientOfRelu(Patched):
    """Backward of GELU is that of ReLU."""

    def patch(self, model: Any) -> None:
        gelu = model.blocks[1].gelu
        gelu.forward = lambda x: F.gelu(x).detach() + F.relu(x) - F.relu(x).detach()


@plants("gpt", "gradient missing")
class BlockDetached(Patched):
    """The first block's stream is cut: what is below gets no gradient."""

    def patch(self, model: Any) -> None:
        model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].detach(),))


@plants("gpt", "loss")
class GptLossIn16Bits(LossIn16Bits):
    pass


@plants("gpt", "forward pass")
class LabelsShifted(Amp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y.roll(-1, dims=1))


@plants("gpt", "optimizer")
class BlockNotUpdated(NotUpdated):
    layer = "blocks.1.up"


@plants("gpt", "no master weights")
class LayerWithoutMasters(RoundedWeights):
    layer = "blocks.1.up"


@plants("gpt", "input gradient")
class HeadGradientTooLate(Patched):
    """What the last layer passes down belongs to the token before."""

    def patch(self, model: Any) -> None:
        spoil_input_gradient(model.output, lambda g: g.roll(1, dims=1))
