"""Networks that do more than call their layers: they keep a state, differentiate themselves, or cast their numbers."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from mpcompare.tasks.data import Dataset
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task


def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


class Spectral(nn.Module):
    """Each call moves the vectors of its power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = spectral_norm(nn.Linear(16, 32)), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Any:
        return self.output(F.gelu(self.hidden(x)))


class WeightNorm(Spectral):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.hidden, self.output = weight_norm(nn.Linear(16, 32)), nn.Linear(32, 4)


class Queue(nn.Module):
    """The keys of the last batches, as in MoCo (He et al., CVPR 2020)."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 32, 8)
        self.register_buffer("queue", F.normalize(torch.randn(8, 64), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.body(x), dim=1)
        output = keys @ self.queue.clone().detach() / 0.2
        if self.training:
            place = int(self.place)
            self.queue[:, place : place + len(x)] = keys.detach().T.to(self.queue.dtype)
            self.place[0] = (place + len(x)) % 64
        return output[:, :4]


class Codebook(nn.Module):
    """Codes that follow the mean of what is near them (van den Oord et al., arXiv 1711.00937, appendix A.1)."""

    codes: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 32, 8), mlp(8, 32, 4)
        self.register_buffer("codes", torch.randn(16, 8))
        self.register_buffer("counts", torch.ones(16))

    def forward(self, x: Tensor) -> Any:
        z = self.encoder(x)
        nearest = torch.cdist(z.float(), self.codes.float()).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 16).to(self.codes.dtype)
                self.counts.mul_(0.9).add_(0.1 * chosen.sum(0))
                self.codes.lerp_(chosen.T @ z.to(self.codes.dtype) / self.counts[:, None], 0.05)
        return self.decoder(z + (self.codes[nearest].to(z.dtype) - z).detach())


class Mapped(nn.Module):
    """Its layers are called by ``torch.func.vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.body(row))(x)


class Forward(Mapped):
    """A derivative in forward mode is a part of its output."""

    def forward(self, x: Tensor) -> Any:
        output, derivative = torch.func.jvp(self.body, (x,), (torch.ones_like(x),))
        return output + 0.1 * derivative


class Pinn(nn.Module):
    """Its own gradient is a part of its output (Raissi, Perdikaris and Karniadakis, J. Comput. Phys. 378, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.body(x)
            (gradient,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + gradient.sum(1, keepdim=True)


class Fourier(nn.Module):
    """A filter of frequencies; it asks for fp32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(16, 32), nn.Linear(32, 4)
        self.filter = nn.Parameter(0.1 * torch.randn(17, 2))

    def forward(self, x: Tensor) -> Any:
        frequencies = torch.fft.rfft(self.hidden(x).float()) * torch.view_as_complex(self.filter.float().contiguous())
        h = torch.fft.irfft(frequencies, n=32)
        return self.output(F.gelu(h).to(self.output.weight.dtype))


class Frequencies(nn.Module):
    """A layer whose output is complex."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x.float())


class Operator(nn.Module):
    """A complex weight for each frequency (Li et al., ICLR 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.frequencies, self.output = nn.Linear(16, 32), Frequencies(), nn.Linear(32, 4)
        self.weight = nn.Parameter(0.3 * torch.randn(17, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        h = torch.fft.irfft(self.frequencies(self.hidden(x)) * self.weight, n=32)
        return self.output(F.gelu(h).to(self.output.weight.dtype))


class Numbers(Mapped):
    """It makes fp32 numbers on its way."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x) * (torch.arange(4, dtype=torch.float32) * 0.3 + 1)


class Adapted(nn.Module):
    """A frozen layer in bf16, and an adapter of a low rank added to it (Hu et al., arXiv 2106.09685)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32)).requires_grad_(False)
        self.base[0].bfloat16()
        self.down, self.up, self.output = nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.base(x) + self.up(self.down(x))))


class Vae(nn.Module):
    """Its noise is drawn in the dtype in which it computes, in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 32, 16), mlp(8, 32, 16)

    def forward(self, x: Tensor) -> Any:
        mean, variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * variance).exp())


class Growing(nn.Module):
    """Makes a buffer when it is called, and replaces another by a table of the length that it meets, as timm's ConViT
    does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.place, self.last = nn.Linear(1, 32), nn.Linear(2, 32), nn.Linear(32, 4)
        self.register_buffer("places", torch.zeros(1, 1, 2), persistent=False)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.places.shape[1] != length:
            at = torch.arange(length) / length
            self.places = torch.stack([at.sin(), at.cos()], -1)[None]
        if self.mask is None:
            self.mask = torch.ones(length, length).tril() / length
        y = torch.tanh(self.first(x[..., None]) + self.place(self.places))
        return self.last((self.mask @ y).mean(1))


def task_of(make: type[nn.Module]) -> tuple[Task, Dataset]:
    """Returns a task of one of these networks, with data that it can learn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    targets = {Pinn: torch.sin(x.sum(1, keepdim=True)), Vae: x}
    y = targets.get(make, x[:, :4].argmax(1))
    task = Task(partial(make), "mse" if make in targets else "cross_entropy", Sgd(0.05, 0.9), 32)
    return task, Dataset("unusual", "", x, y, x[:64], y[:64])


NETWORKS = [
    Spectral, WeightNorm, Queue, Codebook, Mapped, Forward, Pinn, Fourier, Operator, Numbers, Adapted, Vae, Growing,
]  # fmt: skip
