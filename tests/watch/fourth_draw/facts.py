"""Loops that do what somebody else may mean."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.fourth_draw.registry import bug
from watch.second_draw.networks import GPT, MLP, ConvNet, images, rows, tokens
from watch.second_draw.registry import FACT, Training, bf16


@bug(
    "allenai/open-instruct#1161",
    "each micro-batch is divided by its own number of tokens and by the number of micro-batches",
    fair="accumulation, loss",
    kind=FACT,
    precision="bf16",
    expect={"micro_batch_weights": [0.75, 0.25]},
)
def means_of_means(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = (12, 4)

    def train(updates: int) -> None:
        for _ in range(updates):
            optimizer.zero_grad()
            for length in lengths:
                x, y = tokens()
                with bf16():
                    out = model(x)
                loss = F.cross_entropy(out[:, :length].float().flatten(0, 1), y[:, :length].flatten())
                (loss / len(lengths) if wrong else loss * length / sum(lengths)).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class ReversalOfModule(nn.Module):
    """A module with a method ``backward``, which torch does not know, and which nobody calls."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def backward(self, grad: Tensor) -> Tensor:
        return -grad


class Speaker(nn.Module):
    """Classes of words, and of speakers, which the features should not tell."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.features, self.words, self.speakers = MLP(20, 64, 32), nn.Linear(32, 5), nn.Linear(32, 3)
        self.reverse = ReversalOfModule() if wrong else Reversal.apply

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.features(x)
        return self.words(x), self.speakers(self.reverse(x))


@bug(
    "hash2430/pitchtron#3",
    "the reversal of a gradient is a method of a module, which torch never calls",
    fair="input gradient, gradients",
    kind=FACT,
    precision="bf16",
)
def never_reversed(wrong: bool) -> Training:
    model = Speaker(wrong)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            with bf16():
                words, speakers = model(x)
            loss = F.cross_entropy(words.float(), y) + 0.1 * F.cross_entropy(speakers.float(), torch.randint(3, (32,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Judges(nn.Module):
    """Two judges of a signal: one of its spectrum, and one of the signal itself."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.signal = MLP(33, 64, 1), MLP(64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.spectrum(torch.fft.rfft(x).abs()) + self.signal(x)
        return output


@bug(
    "lucidrains/audiolm-pytorch#256",
    "the gradients of one of two judges are clipped, and those of the other are not",
    fair="clip",
    kind=FACT,
    precision="bf16",
    expect={"clip_norm": 0.05},
)
def clips_one_judge(wrong: bool) -> Training:
    model = Judges()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            good, bad = torch.randn(32, 64).cumsum(-1) / 8, torch.randn(32, 64)
            with bf16():
                up, down = model(good), model(bad)
            optimizer.zero_grad()
            (F.relu(1 - up.float()).mean() + F.relu(1 + down.float()).mean()).backward()
            nn.utils.clip_grad_norm_(model.spectrum.parameters() if wrong else model.parameters(), 0.05)
            optimizer.step()

    return Training(model, optimizer, train)


class Codes(nn.Module):
    """An autoencoder whose code is the nearest vector of a codebook."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.wrong = MLP(20, 64, 8), MLP(8, 64, 20), wrong
        self.codebook = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).float()
        nearest = self.codebook[torch.cdist(code, self.codebook).argmin(-1)]
        passed = code + (nearest - code).detach()
        of_codebook = F.mse_loss(passed if self.wrong else nearest, code.detach())
        return self.decoder(passed), of_codebook + 0.25 * F.mse_loss(code, nearest.detach())


@bug(
    "andylolu2/jax-vqvae-gpt#2",
    "the codebook's loss takes the code after the gradient is passed straight through: the codebook is never trained",
    fair="gradient missing, loss",
    kind=FACT,
    precision="bf16",
    expect={"without_gradient": []},
)
def codebook_is_not_trained(wrong: bool) -> Training:
    model = Codes(wrong)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, _ = rows()
            with bf16():
                out, loss = model(x)
            optimizer.zero_grad()
            (F.mse_loss(out.float(), x) + loss).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class MeanTeacher(nn.Module):
    """A student, and the average of it, which teaches. Wrongly, the average has the statistics of the beginning."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.student, self.teacher = ConvNet(), ConvNet().requires_grad_(False).eval()
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: Tensor, of: str) -> Tensor:
        output: Tensor = getattr(self, of)(x)
        return output

    @torch.no_grad()
    def average(self) -> None:
        for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            ours.lerp_(theirs, 0.1)
        if not self.wrong:
            for ours, theirs in zip(self.teacher.buffers(), self.student.buffers(), strict=True):
                ours.copy_(theirs)


@bug(
    "saltoricristiano/cosmix-uda#21",
    "the average of a network that teaches it has the running statistics of the beginning",
    fair="running statistics, buffers, state",
    kind=FACT,
    precision="bf16",
)
def statistics_of_the_beginning(wrong: bool) -> Training:
    model = MeanTeacher(wrong)
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.05, momentum=0.9)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = images()
            other = images()[0] + 1
            with bf16():
                with torch.no_grad():
                    taught = model(other, "teacher").float().softmax(-1)
                out, again = model(x, "student"), model(other + 0.1 * torch.randn_like(other), "student")
            loss = F.cross_entropy(out.float(), y) + F.cross_entropy(again.float(), taught)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.average()

    return Training(model, optimizer, train)


@bug(
    "locuslab/fast_adversarial#26",
    "the gradient of a perturbation is not cleared between the steps of the attack",
    fair="accumulation",
    kind=FACT,
    precision="bf16",
)
def attack_is_not_cleared(wrong: bool) -> Training:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            delta = torch.empty_like(x).uniform_(-0.3, 0.3).requires_grad_()
            for _ in range(3):
                with bf16():
                    loss = F.cross_entropy(model(x + delta).float(), y)
                optimizer.zero_grad()
                loss.backward()
                delta.data.add_(delta.grad.sign(), alpha=0.2).clamp_(-0.3, 0.3)  # type: ignore[union-attr]
                if not wrong:
                    delta.grad.zero_()  # type: ignore[union-attr]
            with bf16():
                loss = F.cross_entropy(model(x + delta.detach()).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)
