"""Norms and activations that compute something else, and buffers that are too coarse."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watch.second_draw.networks import MLP, cross_entropy, rows, tokens
from watch.second_draw.registry import DEFECT, Training, bf16, fp16, plainly, scaler_of
from watch.third_draw.registry import bug


class OwnNorm(nn.Module):
    """A layer norm that computes in the dtype of its input."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return normal * self.weight.to(x.dtype) + self.bias.to(x.dtype)


class Padded(nn.Module):
    """A tagger whose padding has an embedding of 0, and a first layer without a bias."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.tok = nn.Embedding(64, 32, padding_idx=0)
        self.inner, self.norm, self.head = nn.Linear(32, 32, bias=False), OwnNorm(32, eps), nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.inner(self.tok(ids))))
        return output


@bug(
    "tensorflow/tensorflow#24979",
    "the epsilon of a layer norm in fp16 is 1e-12, which rounds to 0: a row without variance becomes NaN",
    fair="eps, inf or NaN, normalization, skip",
    kind=DEFECT,
    precision="fp16",
)
def eps_is_lost(wrong: bool) -> Training:
    model = Padded(1e-12 if wrong else 1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(256.0)
    lengths = torch.tensor([16, 15, 14, 13, 12, 12, 10, 9])

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            mask = torch.arange(16)[None] < lengths[:, None]
            with fp16():
                out = model(x.masked_fill(~mask, 0))
            loss = F.cross_entropy(out.float()[mask], y[mask])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)


class RMSNorm(nn.Module):
    def __init__(self, d: int, wrong: bool) -> None:
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.ones(d)), wrong

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.wrong else x.float()
        normal = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return normal.to(x.dtype) * self.weight.to(x.dtype)


class Outliers(nn.Module):
    """A network whose residual stream is large at some tokens, as in trained transformers."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.tok = nn.Embedding(64, 32)
        self.tok.weight.data[:4] *= 400
        self.norm, self.mlp = RMSNorm(32, wrong), nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.mlp(self.norm(self.tok(ids).half()))
        return output


@bug(
    "microsoft/onnxruntime#29045",
    "the squares of an RMS norm are summed in fp16: they overflow where activations are large, and its output is 0",
    fair="overflow, normalization, forward pass, input gradient",
    kind=DEFECT,
    precision="fp16",
)
def squares_overflow(wrong: bool) -> Training:
    model = Outliers(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(256.0)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            with fp16():
                out = model(x)
            optimizer.zero_grad()
            scaler.scale(cross_entropy(out.float(), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)


class InputNorm(nn.Module):
    """A norm of raw features before an MLP."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.net = wrong, MLP()
        self.weight, self.bias = nn.Parameter(torch.ones(20)), nn.Parameter(torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        if self.wrong:
            variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        else:
            variance = (x - mean).square().mean(-1, keepdim=True)
        output: Tensor = self.net((x - mean) * torch.rsqrt(variance + 1e-5) * self.weight + self.bias)
        return output


def raw() -> tuple[Tensor, Tensor]:
    """Returns features far from 0."""
    x, y = rows()
    return x + 2000, y


@bug(
    "pytorch/pytorch#51102",
    "the variance is the mean of squares minus the squared mean: where the mean is 2000, most of its digits cancel",
    fair="normalization, forward pass, rounding, precision",
    kind=DEFECT,
    precision="bf16",
)
def variance_cancels(wrong: bool) -> Training:
    model = InputNorm(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, raw))


class Root(nn.Module):
    """The root of positive numbers, and other numbers as they are."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return torch.where(x > 0, torch.sqrt(x if self.wrong else x.clamp(min=1e-4)), x)


@bug(
    "pytorch/pytorch#187297",
    "an activation takes the root in a branch of where: where the other branch is taken, its gradient is NaN",
    fair="inf or NaN, forward pass, input gradient",
    kind=DEFECT,
    precision="bf16",
)
def root_in_where(wrong: bool) -> Training:
    model = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), Root(wrong), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class Recomputed(nn.Module):
    """An MLP with a randomized leaky ReLU, whose middle is recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.head = nn.Linear(20, 64), nn.Linear(64, 5)
        self.middle = nn.Sequential(nn.Linear(64, 64), nn.RReLU(0.1, 0.9))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant))
        return output


@bug(
    "pytorch/pytorch#193671",
    "under a checkpoint that is not reentrant, nn.RReLU at the end keeps noise that is not drawn yet",
    fair="forward pass, input gradient, inf or NaN, gradients",
    kind=DEFECT,
    precision="bf16",
)
def noise_before_drawn(wrong: bool) -> Training:
    model = Recomputed(reentrant=not wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class Wavelengths(nn.Module):
    """Sines and cosines of masses, with wavelengths up to 10000."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.register_buffer("term", 10000 ** (torch.arange(0, d, 2) / d) / 6.2832)

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., None].to(self.term.dtype) / self.term
        return torch.cat([x.sin(), x.cos()], -1)


class Spectra(nn.Module):
    """A network of the peaks of a spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = Wavelengths()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5))

    def forward(self, masses: Tensor) -> Tensor:
        output: Tensor = self.net(self.encode(masses)).mean(1)
        return output


@bug(
    "wfondrie/depthcharge#82",
    "the encoder of masses is cast to bf16 with its buffers: the phases of masses of 1000 are off by whole turns",
    fair="buffers in 16 bits, precision, buffers, embedding",
    kind=DEFECT,
    precision="bf16",
)
def encoder_in_bf16(wrong: bool) -> Training:
    model = Spectra()
    if wrong:
        model.encode.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            masses, y = torch.rand(16, 12) * 1000 + 100, torch.randint(5, (16,))
            with bf16():
                out = model(masses)
            optimizer.zero_grad()
            F.cross_entropy(out.float(), y).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Denoiser(nn.Module):
    """An MLP of noisy rows and their time, from 0 to 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.first, self.last = nn.Linear(20, 64), nn.Sequential(nn.SiLU(), nn.Linear(64, 20))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        phase = time.double()[:, None] * 10000 ** (-torch.arange(16).double() / 16)
        embedded = self.time(torch.cat([phase.cos(), phase.sin()], -1).float())
        output: Tensor = self.last(self.first(x) + embedded)
        return output


@bug(
    "modelscope/DiffSynth-Studio#1025",
    "times up to 1000 are cast to bf16 before they are embedded: 998.4 becomes 1000",
    fair="precision, embedding, rounding, forward pass",
    kind=DEFECT,
    precision="bf16",
)
def time_in_bf16(wrong: bool) -> Training:
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, noise, sigma = torch.randn(32, 20), torch.randn(32, 20), torch.rand(32)
            time = 1000 * sigma
            with bf16():
                out = model(torch.lerp(x, noise, sigma[:, None]), time.bfloat16() if wrong else time)
            optimizer.zero_grad()
            F.mse_loss(out.float(), noise - x).backward()
            optimizer.step()

    return Training(model, optimizer, train)
