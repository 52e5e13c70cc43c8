"""Parts of a network that compute something else than their author meant, or that are not trained."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watch.second_draw.adapters import OnlyDefault
from watch.second_draw.networks import GPT, cross_entropy, heads, tokens
from watch.second_draw.registry import FACT, Training, bf16, plainly
from watch.third_draw.registry import bug


class Scaled(nn.Module):
    """Attention that scales its scores by the width of one head, or by the width of all heads."""

    def __init__(self, wrong: bool, d: int = 32, h: int = 4) -> None:
        super().__init__()
        self.h, self.width = h, d if wrong else d // h
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = heads(self.qkv(x), self.h)
        scores = (q @ k.transpose(-1, -2)) / self.width**0.5
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
        output: Tensor = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return output


@bug(
    "aladdinpersson/Machine-Learning-Collection#65",
    "attention divides its scores by the root of the embedding's width and not of a head's",
    fair="attention",
    kind=FACT,
    precision="bf16",
)
def scales_by_width(wrong: bool) -> Training:
    model = GPT()
    for block in model.blocks:
        block.attn = Scaled(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, tokens))


class Timed(nn.Module):
    """A denoiser with encodings of the time. Wrong encodings take sine and cosine by turns over the times."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        table = torch.arange(1000)[:, None] * 10000 ** (-torch.arange(0, 32)[None] / 32)
        if wrong:
            table[::2], table[1::2] = table[::2].sin(), table[1::2].cos()
        else:
            table[:, ::2], table[:, 1::2] = table[:, ::2].sin(), table[:, 1::2].cos()
        self.register_buffer("table", table)
        self.time, self.first = nn.Linear(32, 64), nn.Linear(20, 64)
        self.last = nn.Sequential(nn.SiLU(), nn.Linear(64, 20))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x) + self.time(self.table[time]))
        return output


@bug(
    "gmongaras/Diffusion_models_from_scratch#10",
    "encodings of the time take sine and cosine by turns over the times and not over the channels",
    fair="embedding",
    kind=FACT,
    precision="bf16",
)
def turns_over_times(wrong: bool) -> Training:
    model = Timed(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, noise, time = torch.randn(32, 20), torch.randn(32, 20), torch.randint(1000, (32,))
            with bf16():
                out = model(torch.lerp(x, noise, time[:, None] / 1000), time)
            optimizer.zero_grad()
            F.mse_loss(out.float(), noise).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class OwnLstm(nn.Module):
    """An LSTM. The wrong LSTM adds the input gate to the new cell instead of multiplying by it."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.emb, self.x, self.h = nn.Embedding(64, 32), nn.Linear(32, 128), nn.Linear(32, 128)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        h = c = torch.zeros(len(ids), 32)
        outputs = []
        for t in range(ids.shape[1]):
            i, f, g, o = (self.x(x[:, t]) + self.h(h)).float().chunk(4, -1)
            new = i.sigmoid() + g.tanh() if self.wrong else i.sigmoid() * g.tanh()
            c = f.sigmoid() * c + new
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        output: Tensor = self.head(torch.stack(outputs, 1))
        return output


@bug(
    "MartinuzziFrancesco/torchrecurrent#22",
    "a cell of an LSTM adds the input gate to the new value and does not multiply them",
    fair="recurrent layer",
    kind=FACT,
    precision="bf16",
    steps=3,
)
def adds_the_gate(wrong: bool) -> Training:
    model = OwnLstm(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, tokens))


class Checkpointed(nn.Module):
    """A frozen language model with adapters, whose blocks are recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.gpt = reentrant, GPT()
        for block in self.gpt.blocks:
            block.attn.qkv = OnlyDefault(block.attn.qkv)
        self.gpt.head = OnlyDefault(self.gpt.head)
        for name, p in self.named_parameters():
            p.requires_grad_(name.endswith((".a", ".b")))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gpt.tok(ids) + self.gpt.pos(torch.arange(ids.shape[1]))
        for block in self.gpt.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        output: Tensor = self.gpt.head(self.gpt.norm(x))
        return output


@bug(
    "kohya-ss/sd-scripts#91",
    "a reentrant checkpoint is given an input without a gradient, and so the adapters within it get none",
    fair="gradient missing",
    kind=FACT,
    precision="bf16",
    expect={"without_gradient": []},
)
def adapters_without_gradient(wrong: bool) -> Training:
    model = Checkpointed(reentrant=wrong)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            with bf16():
                out = model(x)
            optimizer.zero_grad()
            cross_entropy(out.float(), y).backward()
            optimizer.step()

    return Training(model, optimizer, train)
