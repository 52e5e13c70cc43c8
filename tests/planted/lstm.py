"""Planted bugs in the training of a recurrent network."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from planted import layers
from planted.registry import BF16, Family
from support.tasks import part
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.text import ALPHABET, topics
from mpcompare.tasks.losses import cross_entropy
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharLstm


def make() -> tuple[Task, Dataset]:
    model = partial(CharLstm, len(ALPHABET), 32, 1)
    return Task(model, "cross_entropy", Sgd(0.3, 0.9), 32), part(topics(0, 24), 640)


LSTM = Family("lstm", make, steps=12, precisions=BF16)


class ByHand(layers.Patched):
    """``amp`` with an LSTM that goes step by step, so that bugs fit inside: products in 16 bits, gates and states in
    fp32."""

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


@LSTM.plants("recurrent layer")
class HiddenStateDetached(ByHand):
    """Backward through time ends after one step."""

    def hidden(self, h: Tensor) -> Tensor:
        return h.detach()


@LSTM.plants("recurrent layer")
class CellStateDetached(ByHand):
    """No gradient passes along the cell states."""

    def cell(self, c: Tensor) -> Tensor:
        return c.detach()


@LSTM.plants("recurrent layer")
class ForgetGateDetached(ByHand):
    def gates(self, gates: Tensor) -> Tensor:
        i, f, g, o = gates.chunk(4, 1)
        return torch.cat([i, f.detach(), g, o], 1)


@LSTM.plants("recurrent layer")
class CellGradientIn16Bits(ByHand):
    """The gradient of the cell state is cut to 4 bits on its way back in time."""

    def cell(self, c: Tensor) -> Tensor:
        c = c.view_as(c)
        if c.requires_grad:
            c.register_hook(lambda g: g.to(torch.float8_e5m2).float())
        return c


@LSTM.plants("recurrent layer")
class GatesSwapped(ByHand):
    """Input gate and forget gate change places."""

    def gates(self, gates: Tensor) -> Tensor:
        i, f, g, o = gates.chunk(4, 1)
        return torch.cat([f, i, o, g], 1)


@LSTM.plants("gradient scaled")
class RecurrentGradientScaled(Amp):
    """The gradient of the recurrent weights is a tenth too small."""

    def backward(self) -> None:
        super().backward()
        self.model.lstm.weight_hh_l0.grad *= 0.9


LSTM.plants("gradient missing", name="EmbeddingGradientDropped")(
    layers.variant(layers.GradientMissing, parameter="embedding.weight")
)
LSTM.plants("embedding")(layers.EmbeddingSummedIn16Bits)


@LSTM.plants("embedding")
class EachTokenCountedOnce(Amp):
    """A token that comes twice gets the gradient of one place only."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.counts = x.flatten().bincount(minlength=self.model.embedding.num_embeddings).clamp_min(1)
        return super().forward(x, y)

    def backward(self) -> None:
        super().backward()
        self.model.embedding.weight.grad /= self.counts[:, None]


@LSTM.plants("loss")
class MeanOverTheWrongNumber(Amp):
    """The loss is divided by one token less for each row."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        super().forward(x, y)
        self.loss = self.loss * (y.shape[1] / (y.shape[1] - 1))
        return self.loss.detach()


LSTM.plants("loss")(layers.LabelsShifted)


@LSTM.plants("loss")
class LastTokenIgnored(Amp):
    """The loss leaves out the last token of each row."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.compute_dtype):
            output = self.model(x)
            self.loss = cross_entropy(output[:, :-1], y[:, :-1])
        self.observed = {"activations": output.dtype, "loss": self.loss.dtype}
        return self.loss.detach()


LSTM.plants("loss", name="LstmLossIn16Bits")(layers.LossIn16Bits)


@LSTM.plants("input gradient")
class HalfOfTheOutputDetached(layers.WrongInputGradient):
    """The last layer passes no gradient down to the states of every second token."""

    layer = "output"

    def wrong(self, g: Tensor) -> Tensor:
        g = g.clone()
        g[:, ::2] = 0
        return g


LSTM.plants("update left out", name="LstmNotUpdated")(layers.variant(layers.NotUpdated, layer="lstm"))
LSTM.plants("no master weights", name="LstmWithoutMasters")(layers.variant(layers.RoundedWeights, layer="lstm"))


@LSTM.plants("later steps")
class StaleRecurrentWeights(MasterWeights):
    """The 16-bit copy of the recurrent weights is not renewed."""

    def step(self, lr: float | Tensor) -> None:
        kept = self.model.lstm.weight_hh_l0.detach().clone()  # type: ignore[operator, union-attr]
        super().step(lr)
        with torch.no_grad():
            self.model.lstm.weight_hh_l0.copy_(kept)  # type: ignore[operator, union-attr]
