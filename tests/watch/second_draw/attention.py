"""Attention that computes something else."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.second_draw.networks import heads, tokens
from watch.second_draw.registry import DEFECT, Training, bf16, bug, fp16, scaler_of


class Rope(nn.Module):
    """The cosines and sines of rotary embeddings; ``guard`` keeps autocast away from them."""

    def __init__(self, d: int, guard: bool) -> None:
        super().__init__()
        self.guard = guard
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, d, 2).float() / d), persistent=False)

    def forward(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        enabled = False if self.guard else torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=enabled, dtype=torch.bfloat16):
            freqs = (self.inv_freq.float()[:, None] @ pos.float()[None, :]).t()
        return freqs.cos(), freqs.sin()


class RopeAttention(nn.Module):
    def __init__(self, d: int, h: int, guard: bool) -> None:
        super().__init__()
        self.h = h
        self.rope = Rope(d // h, guard)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = heads(self.qkv(x), self.h)
        cos, sin = self.rope(pos)
        out = F.scaled_dot_product_attention(self.turn(q, cos, sin), self.turn(k, cos, sin), v)
        output: Tensor = self.proj(out.transpose(1, 2).reshape(b, t, d))
        return output


class Dit(nn.Module):
    """A block of a diffusion transformer, with positions from 65536 on."""

    def __init__(self, guard: bool, d: int = 32) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(12, d), nn.Linear(d, 12)
        self.n1, self.n2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), RopeAttention(d, 4, guard)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        pos = 65536 + torch.arange(x.shape[1])
        x = self.inp(x)
        x = x + self.attn(self.n1(x), pos)
        output: Tensor = self.out(x + self.mlp(self.n2(x)))
        return output


@bug(
    "huggingface/diffusers#13922",
    "the frequencies of rotary embeddings are a matmul that autocast makes in bf16: positions from 65536 on are all "
    "the same",
    fair="forward pass, precision, attention, products, input gradient",
    kind=DEFECT,
    precision="bf16",
)
def rope_under_autocast(wrong: bool) -> Training:
    model = Dit(guard=not wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x = torch.randn(4, 16, 12)
            noise = torch.randn_like(x)
            with bf16():
                out = model(x + noise)
            optimizer.zero_grad()
            F.mse_loss(out.float(), noise - x).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Masked(nn.Module):
    """Attention with a mask of later tokens, and a mask of padding. Biases are as large as in trained networks."""

    def __init__(self, wrong: bool, d: int = 32, h: int = 4) -> None:
        super().__init__()
        self.wrong, self.h = wrong, h
        self.emb, self.qkv, self.proj = nn.Embedding(64, d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 64)
        with torch.no_grad():
            self.qkv.bias[:d] += 2.9
            self.qkv.bias[d : 2 * d] -= 2.9

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.emb(ids)
        b, t, d = x.shape
        q, k, v = heads(self.qkv(self.norm(x)), self.h)
        least = torch.finfo(q.dtype).min
        causal = torch.full((t, t), least, dtype=q.dtype).triu(1)
        pad = (~mask[:, None, None, :]).to(q.dtype) * least
        scores = q @ k.transpose(-1, -2) / (d // self.h) ** 0.5 + (causal + pad)
        if not self.wrong:
            scores = torch.max(scores, torch.tensor(least, dtype=scores.dtype))
        probs = scores.float().softmax(-1).to(v.dtype)
        output: Tensor = self.head(x + self.proj((probs @ v).transpose(1, 2).reshape(b, t, d)))
        return output


@bug(
    "huggingface/transformers#18057",
    "two masks of the least fp16 add up to -inf, and the softmax of a row that is masked wholly is NaN",
    fair="attention, overflow, inf or NaN, skip, forward pass",
    kind=DEFECT,
    precision="fp16",
)
def mask_overflows(wrong: bool) -> Training:
    model = Masked(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(256.0)
    padding = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5])  # on the left

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            mask = torch.arange(16)[None] >= padding[:, None]
            with fp16():
                out = model(x, mask)
            loss = F.cross_entropy(out.float()[mask], y[mask])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)
