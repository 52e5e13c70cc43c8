"""Losses, layers and backward methods that are not finite, or not the derivative."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.fourth_draw.registry import bug
from watch.second_draw.networks import GPT, MLP, cross_entropy, heads, rows, tokens
from watch.second_draw.registry import DEFECT, Training, bf16, fp16, plainly, scaler_of

Function = torch.autograd.Function


class MulConstant(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, constant: float) -> Tensor:
        ctx.constant = constant
        return x * constant

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.constant, None


class MulConstantWrong(MulConstant):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Sharpened(nn.Module):
    """A classifier whose hidden values are multiplied by a constant."""

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.function = function
        self.first, self.norm, self.last = nn.Linear(20, 64), nn.LayerNorm(64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.function.apply(self.norm(self.first(x)), 0.25)))
        return output


@bug(
    "zergtant/pytorch-handbook#69",
    "the backward method of a product with a constant returns the gradient without the constant",
    fair="input gradient, gradient scaled, forward pass, gradients, normalization",
    kind=DEFECT,
    precision="bf16",
)
def without_the_constant(wrong: bool) -> Training:
    model = Sharpened(MulConstantWrong if wrong else MulConstant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class Sequences(nn.Module):
    """An encoder of short sequences of few tokens, so that two of them are often the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.net = nn.Embedding(4, 32), MLP(32, 64, 16)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.net(self.tok(ids).mean(1))
        return output


@bug(
    "tensorflow/tensorflow#30199",
    "the distance of a triplet loss is a root without an epsilon: for two equal sequences its gradient is NaN",
    fair="inf or NaN, loss, gradients",
    kind=DEFECT,
    precision="bf16",
)
def equal_sequences(wrong: bool) -> Training:
    model = Sequences()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return ((a - b).square().sum(-1) + (0.0 if wrong else 1e-8)).sqrt()

    def train(updates: int) -> None:
        for _ in range(updates):
            anchor, positive, negative = (torch.randint(4, (16, 3)) for _ in range(3))
            positive[:, 1:] = anchor[:, 1:]
            with bf16():
                a, p, n = (model(ids).float() for ids in (anchor, positive, negative))
            optimizer.zero_grad()
            F.relu(distance(a, p) - distance(a, n) + 0.2).mean().backward()
            optimizer.step()

    return Training(model, optimizer, train)


def sinkhorn(logits: Tensor, by_logs: bool) -> Tensor:
    """Returns the targets of a batch, so that all prototypes are used alike."""
    if by_logs:
        for _ in range(3):
            logits = logits - logits.logsumexp(0)
            logits = logits - logits.logsumexp(1, keepdim=True)
        return logits.exp()
    q = logits.exp()
    for _ in range(3):
        q = q / q.sum(0)
        q = q / q.sum(1, keepdim=True)
    return q


class SelfTaught(nn.Module):
    """A student, and a teacher that is its average."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = MLP(20, 64, 16), MLP(20, 64, 16).requires_grad_(False)
        self.student.net[5].weight.data *= 10
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: Tensor, of: str) -> Tensor:
        output: Tensor = getattr(self, of)(x)
        return output

    @torch.no_grad()
    def average(self) -> None:
        for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            ours.lerp_(theirs, 0.01)


@bug(
    "facebookresearch/dinov2#583",
    "the exponentials of a teacher's logits over a temperature of 0.04 overflow: inf/inf is NaN in the targets",
    fair="inf or NaN, overflow, loss",
    kind=DEFECT,
    precision="bf16",
)
def targets_overflow(wrong: bool) -> Training:
    model = SelfTaught()
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x = torch.randn(32, 20)
            with bf16():
                with torch.no_grad():
                    taught = model(x, "teacher").float()
                out = model(x + 0.1 * torch.randn_like(x), "student").float()
            target = sinkhorn(taught / 0.04, by_logs=not wrong)
            optimizer.zero_grad()
            (-target * F.log_softmax(out / 0.1, -1)).sum(-1).mean().backward()
            optimizer.step()
            model.average()

    return Training(model, optimizer, train)


@bug(
    "pytorch/pytorch#121416",
    "missing targets are NaN, and are masked only after the squared error is taken: 0 times NaN is NaN",
    fair="inf or NaN, loss",
    kind=DEFECT,
    precision="bf16",
)
def masked_too_late(wrong: bool) -> Training:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x = torch.randn(32, 20)
            y = x[:, :5].masked_fill(torch.rand(32, 5) < 0.2, torch.nan)
            known = ~y.isnan()
            with bf16():
                out = model(x)
            if wrong:
                loss = F.mse_loss(out.float(), y, reduction="none")[known].mean()
            else:
                loss = F.mse_loss(out.float()[known], y[known])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


class GraphNorm(nn.Module):
    """The layer norm of a graph network, over all nodes and channels of a graph."""

    def __init__(self, d: int, wrong: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.wrong = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d)), wrong

    def forward(self, x: Tensor, graph: Tensor, graphs: int) -> Tensor:
        x = x.float()
        count = torch.bincount(graph, minlength=graphs).clamp(min=1) * x.shape[1]
        mean = x.new_zeros(graphs).index_add(0, graph, x.sum(-1)) / count
        x = x - mean[graph][:, None]
        variance = x.new_zeros(graphs).index_add(0, graph, x.square().sum(-1)) / count
        root = variance.sqrt() + 1e-5 if self.wrong else (variance + 1e-5).sqrt()
        return x / root[graph][:, None] * self.weight + self.bias


class Graphs(nn.Module):
    """A network of graphs. Some of them have only nodes without features."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 32, bias=False), GraphNorm(32, wrong)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor, graph: Tensor, graphs: int) -> Tensor:
        x = F.gelu(self.norm(self.first(x), graph, graphs))
        output: Tensor = self.last(x.new_zeros(graphs, x.shape[1]).index_add(0, graph, x))
        return output


@bug(
    "pyg-team/pytorch_geometric#2917",
    "a graph's norm adds its epsilon to the root of the variance: in a graph without variance the gradient is NaN",
    fair="inf or NaN, eps, normalization",
    kind=DEFECT,
    precision="bf16",
)
def eps_after_the_root(wrong: bool) -> Training:
    model = Graphs(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for i in range(updates):
            graph = torch.randint(8, (64,)).sort().values
            x, y = torch.randn(64, 12), torch.randint(5, (8,))
            if i % 3 == 1:
                x[graph == 2] = 0
            with bf16():
                out = model(x, graph, 8)
            optimizer.zero_grad()
            F.cross_entropy(out.float(), y).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class InPlaceEntropy(Function):
    """A cross-entropy that writes its gradient over the logits, as a kernel does, which torch does not notice."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        total = logits.logsumexp(-1)
        ctx.save_for_backward(logits, total, target)
        return (total - logits.gather(-1, target[:, None]).squeeze(-1)).mean()

    @staticmethod
    def into(ctx: Any, logits: Tensor) -> Tensor:
        """Returns the tensor into which the gradient is written."""
        return logits.data

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, total, target = ctx.saved_tensors
        out = cls.into(ctx, logits).copy_((logits - total[:, None]).exp())
        out[torch.arange(len(out)), target] -= 1
        return out.mul_(grad / len(out)), None


class Entropy(InPlaceEntropy):
    @staticmethod
    def into(ctx: Any, logits: Tensor) -> Tensor:
        return torch.empty_like(logits)


@bug(
    "unslothai/unsloth#5002",
    "the backward method of a cross-entropy writes over the logits, of which a second loss takes its gradient later",
    fair="loss, input gradient, gradients, forward pass",
    kind=DEFECT,
    precision="bf16",
)
def writes_over_logits(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    entropy = InPlaceEntropy if wrong else Entropy

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            with bf16():
                out = model(x)
            logits = out.float().flatten(0, 1)
            loss = 0.05 * logits.logsumexp(-1).square().mean()  # backward comes to it last
            loss = loss + entropy.apply(logits, y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


class LinearAttention(nn.Module):
    """Attention whose sums over keys stand for the softmax. Wrongly, they are in the format of the keys."""

    def __init__(self, wrong: bool, d: int = 32, h: int = 4) -> None:
        super().__init__()
        self.h, self.wrong = h, wrong
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = heads(self.qkv(x), self.h)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        with torch.autocast("cpu", enabled=False):
            if not self.wrong:
                q, k, v = q.float(), k.float(), v.float()
            over = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-3
            out = q @ (k.transpose(-1, -2) @ v / t) / over * t
        output: Tensor = self.proj(out.transpose(1, 2).reshape(b, t, d))
        return output


class LongRows(nn.Module):
    """A tagger of long sequences, whose queries and keys have grown large, as in a trained network."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.tok, self.norm, self.head = nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 64)
        self.attn = LinearAttention(wrong)
        self.attn.qkv.weight.data[:64] *= 20

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        output: Tensor = self.head(x + self.attn(self.norm(x)))
        return output


@bug(
    "idiap/fast-transformers#32",
    "the sums over the keys of a linear attention overflow in fp16: what is divided by them is 0",
    fair="overflow, attention, inf or NaN, forward pass, products, input gradient, skip",
    kind=DEFECT,
    precision="fp16",
    steps=3,
)
def sums_of_keys_overflow(wrong: bool) -> Training:
    model = LongRows(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(64.0)

    def train(updates: int) -> None:
        for _ in range(updates):
            ids = torch.randint(64, (2, 513))
            with fp16():
                out = model(ids[:, :-1])
            optimizer.zero_grad()
            scaler.scale(cross_entropy(out.float(), ids[:, 1:])).backward()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)
