"""Planted bugs in the training of a recurrent network."""

from typing import Any

import torch
import torch.nn.functional as F
from planted.registry import LossIn16Bits, NotUpdated, Patched, RoundedWeights, plants, spoil_input_gradient
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.tasks.losses import cross_entropy


class ByHand(Patched):
    """The LSTM step by step, so that its inside can be spoilt: products in 16 bits, gates and states in fp32."""

    def patch(self, model: Any) -> None:
        lstm = model.lstm

        def forward(x: Tensor) -> tuple[Tensor, None]:
            h = x.new_zeros(len(x), lstm.hidden_size)
            c, outputs = h.float(), []
            for x_t in x.unbind(1):
                gates = F.linear(x_t, lstm.weight_ih_l0, lstm.bias_ih_l0)
                gates = gates + F.linear(self.hidden(h), lstm.weight_hh_l0, lstm.bias_hh_l0)
                i, f, g, o = self.gates(gates.float()).chunk(4, 1)
                c = f.sigmoid() * self.cell(c) + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outputs.append(h)
            return torch.stack(outputs, 1), None

        lstm.forward = forward

    def hidden(self, h: Tensor) -> Tensor:
        return h

    def cell(self, c: Tensor) -> Tensor:
        return c

    def gates(self, gates: Tensor) -> Tensor:
        return gates


@plants("lstm", "recurrent layer")
class HiddenStateDetached(ByHand):
    """Backward through time ends after one step."""

    def hidden(self, h: Tensor) -> Tensor:
        return h.detach()


@plants("lstm", "recurrent layer")
class CellStateDetached(ByHand):
    def cell(self, c: Tensor) -> Tensor:
        return c.detach()


@plants("lstm", "recurrent layer")
class ForgetGateDetached(ByHand):
    def gates(self, gates: Tensor) -> Tensor:
        i, f, g, o = gates.chunk(4, 1)
        return torch.cat([i, f.detach(), g, o], 1)


@plants("lstm", "recurrent layer")
class CellGradientIn16Bits(ByHand):
    """The gradient of the cell state is cut to 4 bits on its way back in time."""

    def cell(self, c: Tensor) -> Tensor:
        c = c.view_as(c)
        if c.requires_grad:
            c.register_hook(lambda g: g.to(torch.float8_e5m2).float())
        return c


@plants("lstm", "forward pass")
class GatesSwapped(ByHand):
    """Input and forget gate change places."""

    def gates(self, gates: Tensor) -> Tensor:
        i, f, g, o = gates.chunk(4, 1)
        return torch.cat([f, i, o, g], 1)


@plants("lstm", "gradient scaled")
class RecurrentGradientScaled(Amp):
    """The gradient of the recurrent weights alone."""

    def backward(self) -> None:
        super().backward()
        self.model.lstm.weight_hh_l0.grad *= 0.9


@plants("lstm", "gradient missing")
class EmbeddingGradientDropped(Amp):
    def backward(self) -> None:
        super().backward()
        self.model.embedding.weight.grad = None


@plants("lstm", "embedding")
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


@plants("lstm", "embedding")
class EachTokenCountedOnce(Amp):
    """A token that comes twice gets the gradient of one place only."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.counts = x.flatten().bincount(minlength=self.model.embedding.num_embeddings).clamp_min(1)
        return super().forward(x, y)

    def backward(self) -> None:
        super().backward()
        self.model.embedding.weight.grad /= self.counts[:, None]


@plants("lstm", "loss")
class MeanOverTheWrongNumber(Amp):
    """The loss is divided by one token less for each row."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        super().forward(x, y)
        self.loss = self.loss * (y.shape[1] / (y.shape[1] - 1))
        return self.loss.detach()


@plants("lstm", "forward pass")
class LabelsShifted(Amp):
    """Each label is the character after the next."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y.roll(-1, dims=1))


@plants("lstm", "forward pass")
class LastTokenIgnored(Amp):
    """The loss leaves out the last token of each row."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(x)
            self.loss = cross_entropy(output[:, :-1], y[:, :-1])
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


@plants("lstm", "loss")
class LstmLossIn16Bits(LossIn16Bits):
    pass


@plants("lstm", "input gradient")
class HalfOfTheOutputDetached(Patched):
    """Of the states that the last layer gets, those of every second token pass no gradient down."""

    def patch(self, model: Any) -> None:
        def wrong(g: Tensor) -> Tensor:
            g = g.clone()
            g[:, ::2] = 0
            return g

        spoil_input_gradient(model.output, wrong)


@plants("lstm", "optimizer")
class LstmNotUpdated(NotUpdated):
    layer = "lstm"


@plants("lstm", "no master weights")
class LstmWithoutMasters(RoundedWeights):
    layer = "lstm"


@plants("lstm", "later steps")
class StaleRecurrentWeights(MasterWeights):
    """The 16-bit copy of the recurrent weights is not renewed."""

    def step(self, lr: float | Tensor) -> None:
        kept = self.model.lstm.weight_hh_l0.detach().clone()  # type: ignore[operator, union-attr]
        super().step(lr)
        with torch.no_grad():
            self.model.lstm.weight_hh_l0.copy_(kept)  # type: ignore[operator, union-attr]
