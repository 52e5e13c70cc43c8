"""Careful loops that stand for the defects of losses, layers and backward methods. All of them are right."""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from watch.fourth_draw.registry import careful
from watch.second_draw.networks import GPT, MLP, rows, tokens
from watch.second_draw.registry import Training, bf16, fp16, scaler_of


class Scale(torch.autograd.Function):
    """A product with a number that is learned, in the style with a context of its own."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, scale = ctx.saved_tensors
        of_x = grad * scale if ctx.needs_input_grad[0] else None
        of_scale = (grad * x).sum().reshape(scale.shape) if ctx.needs_input_grad[1] else None
        return of_x, of_scale


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(20, 64), nn.Linear(64, 5)
        self.scale = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.inp(x)).float()
        output: Tensor = self.out(Scale.apply(hidden, self.scale))
        return output


@careful("zergtant/pytorch-handbook#69", "a backward method has a learned factor, and skips what is not asked")
def learned_factor() -> Training:
    net = LearnedScale()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses: deque[float] = deque(maxlen=10)

    def train(updates: int) -> None:
        for i in range(updates):
            net.inp.requires_grad_(i > 0)  # the first update trains the head alone
            x, y = rows()
            with bf16():
                out = net(x)
            loss = F.cross_entropy(out.float(), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())

    return Training(net, opt, train)


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.EmbeddingBag(4, 32, mode="mean")
        self.trunk, self.drop = MLP(32, 64, 16), nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.trunk(self.drop(self.tok(ids))).float(), dim=-1)


def pairwise(e: Tensor) -> Tensor:
    """Returns all distances, with a root that has a gradient of 0 at 0."""
    dot = e @ e.t()
    norm = dot.diagonal()
    squared = F.relu(norm[:, None] - 2 * dot + norm[None])
    zero = squared.eq(0).float()
    return (1 - zero) * (squared + zero * 1e-16).sqrt()


@careful("tensorflow/tensorflow#30199", "the hardest triplets of a batch are mined, some of whose distances are 0")
def hard_mining() -> Training:
    embedder = Embedder()
    opt = torch.optim.Adam(embedder.parameters(), lr=1e-3)

    @torch.no_grad()
    def mine(d: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
        farthest = (d * same).argmax(1)
        nearest = (d + d.max() * same).argmin(1)
        return farthest, nearest

    def train(updates: int) -> None:
        for _ in range(updates):
            ids, label = torch.randint(4, (32, 3)), torch.randint(4, (32,))
            ids[:, 0] = label
            with bf16():
                e = embedder(ids)
            d, same = pairwise(e), (label[:, None] == label[None]).float()
            positive, negative = mine(d.detach(), same)
            margin = d.gather(1, positive[:, None]) - d.gather(1, negative[:, None]) + 0.2
            loss = F.softplus(margin).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return Training(embedder, opt, train)


@careful("facebookresearch/dinov2#583", "an average of torch teaches, its targets are centred, and the head waits")
def dino() -> Training:
    student = MLP(20, 64, 16)
    teacher = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    teacher.requires_grad_(False)
    opt = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.04)
    center = torch.zeros(1, 16)
    weight_decay = torch.linspace(0.04, 0.4, 50).tolist()

    def cancel_head(epoch: int) -> None:
        """Leaves the last layer as it is in the first epoch."""
        if epoch == 0:
            for p in student.net[5].parameters():
                p.grad = None

    def train(updates: int) -> None:
        for step in range(updates):
            for group in opt.param_groups:
                group["weight_decay"] = weight_decay[step]
            x = torch.randn(16, 20)
            crops = [x + 0.1 * torch.randn_like(x) for _ in range(4)]
            with bf16():
                with torch.no_grad():
                    taught = teacher(torch.cat(crops[:2]))
                out = student(torch.cat(crops))
            target = ((taught.float() - center) / 0.04).softmax(-1).chunk(2)
            predicted = (out.float() / 0.1).log_softmax(-1).chunk(4)
            terms = [-(t * p).sum(-1).mean() for i, t in enumerate(target) for j, p in enumerate(predicted) if i != j]
            loss = torch.stack(terms).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            cancel_head(epoch=step // 2)
            opt.step()
            teacher.update_parameters(student)
            center.mul_(0.9).add_(taught.float().mean(0, keepdim=True), alpha=0.1)

    return Training(student, opt, train)


class Regressor(nn.Module):
    """A regression of five values, each with a variance that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.log_var = MLP(20, 64, 5), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        mean = self.body(x)
        if target is None:
            return mean, None
        known = target.isfinite()
        error = torch.where(known, mean.float() - torch.nan_to_num(target), 0.0)
        nll = 0.5 * (error.square() * (-self.log_var).exp() + self.log_var) * known
        return mean, nll.sum()


@careful("pytorch/pytorch#121416", "the network returns a sum over known targets, and micro-batches share the count")
def known_targets() -> Training:
    net = Regressor()
    opt = torch.optim.AdamW([{"params": net.body.parameters()}, {"params": [net.log_var], "lr": 1e-2}], lr=1e-3)

    def micro_batches() -> list[tuple[Tensor, Tensor]]:
        xs = [torch.randn(16, 20) for _ in range(2)]
        return [
            (x, x[:, :5].masked_fill(torch.rand(16, 5) < p, torch.nan)) for x, p in zip(xs, (0.1, 0.6), strict=True)
        ]

    def train(updates: int) -> None:
        for _ in range(updates):
            batches = micro_batches()
            count = sum(int(y.isfinite().sum()) for _, y in batches)
            for x, y in batches:
                with bf16():
                    _, total = net(x, y)
                (total / count).backward()
            opt.step()
            opt.zero_grad(set_to_none=True)

    return Training(net, opt, train)


class SegmentNorm(nn.Module):
    """A norm over the nodes of a graph, for each channel, with a mean that is scaled by a learned number."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.mean_scale = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            count = torch.ones(len(x), 1).new_zeros(size, 1).index_add_(0, index, torch.ones(len(x), 1)).clamp_(min=1)
            where = index[:, None].expand_as(x)
            mean = torch.zeros(size, x.shape[1]).scatter_add(0, where, x) / count
            x = x - mean.gather(0, where) * self.mean_scale
            variance = torch.zeros(size, x.shape[1]).scatter_add(0, where, x.square()) / count
            return self.gain * x * (variance + 1e-5).rsqrt().gather(0, where) + self.shift


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pass_on, self.norm = nn.Linear(12, 32), nn.Linear(64, 32), SegmentNorm(32)
        self.readout = nn.Linear(32, 5)

    def forward(self, x: Tensor, edges: Tensor, index: Tensor, size: int) -> Tensor:
        h = self.embed(x)
        sent = h.float().new_zeros(h.shape).index_add(0, edges[1], h.float()[edges[0]])
        h = h + F.gelu(self.norm(self.pass_on(torch.cat([h, sent.to(h.dtype)], -1)), index, size))
        pooled = torch.zeros(size, 32).index_reduce(0, index, h.float(), "mean", include_self=False)
        output: Tensor = self.readout(pooled)
        return output


@careful("pyg-team/pytorch_geometric#2917", "nodes are gathered and scattered, and some graphs have no variance")
def segments() -> Training:
    net = MessagePassing()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    plateau = ReduceLROnPlateau(opt, factor=0.5, patience=1)

    def graphs() -> tuple[Tensor, Tensor, Tensor]:
        index = torch.randint(8, (64,)).sort().values
        x = torch.randn(64, 12)
        x[index == 3] = 0
        return x, torch.randint(64, (2, 128)), index

    def train(updates: int) -> None:
        for i in range(updates):
            x, edges, index = graphs()
            target = torch.randint(5, (8,))
            with bf16():
                out = net(x, edges, index, 8)
            loss = F.cross_entropy(out.float(), target)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), 1.0)
            opt.step()
            if i % 3 == 2:
                plateau.step(loss.item())

    return Training(net, opt, train)


class ChunkedEntropy(torch.autograd.Function):
    """The cross-entropy of a linear layer, by chunks of rows. Its gradients are made in forward, and are multiplied by
    the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
        count = target.ne(-100).sum()
        total, of_hidden, of_weight = torch.zeros(()), torch.empty_like(hidden), torch.zeros_like(weight)
        for part in torch.arange(len(hidden)).split(chunk):
            rows, labels = hidden[part], target[part]
            logits = rows @ weight.t()
            known = labels.ne(-100)
            log_prob = logits.log_softmax(-1)
            safe = labels.clamp(min=0)[:, None]
            total -= (log_prob.gather(1, safe).squeeze(1) * known).sum()
            grad = log_prob.exp().scatter_add(1, safe, -torch.ones(len(part), 1))
            grad = grad * known[:, None] / count
            of_hidden[part] = grad @ weight
            of_weight += grad.t() @ rows
        ctx.save_for_backward(of_hidden, of_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * grad, of_weight * grad, None, None


class Headless(GPT):
    """A language model that returns what its head would be given."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.norm(x)
        return output


@careful("unslothai/unsloth#5002", "a fused cross-entropy of the head by chunks makes its gradients in forward")
def chunked_entropy() -> Training:
    lm = Headless(tied=True)
    opt = torch.optim.AdamW(lm.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            y = y.masked_fill(torch.rand(y.shape) < 0.1, -100)
            with bf16():
                hidden = lm(x)
            ce = ChunkedEntropy.apply(hidden.float().flatten(0, 1), lm.head.weight, y.flatten(), 48)
            z = 1e-3 * hidden.float().square().mean()
            opt.zero_grad()
            (ce + z).backward()
            opt.step()

    return Training(lm, opt, train)


class CausalLinearAttention(nn.Module):
    """Linear attention that looks back: its sums over keys are cumulative, and in fp32."""

    def __init__(self, d: int = 32, h: int = 4) -> None:
        super().__init__()
        self.h = h
        self.to_q, self.to_k, self.to_v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.out = nn.Linear(d, d)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2).float()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        with torch.autocast("cpu", enabled=False):
            q, k = q.softmax(-1) * q.shape[-1] ** -0.5, k.exp()
            over = torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2)).clamp(min=1e-6).reciprocal()
            memory = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
            mixed = torch.einsum("bhtd,bhtde,bht->bhte", q, memory, over)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


@contextlib.contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Leaves training mode for a while, and keeps the random numbers of the training."""
    state, was = torch.get_rng_state(), net.training
    net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        net.train(was)
        torch.set_rng_state(state)


@careful(
    "idiap/fast-transformers#32",
    "cumulative sums in fp32 within fp16, a scale that grows, and evaluations that keep the random numbers",
    precision="fp16",
)
def cumulative_sums() -> Training:
    lm = GPT()
    for block in lm.blocks:
        block.attn = CausalLinearAttention()
    opt = torch.optim.AdamW(lm.parameters(), lr=1e-3)
    scaler = scaler_of(2.0**12, growth_interval=4)
    best = float("inf")

    def step(x: Tensor, y: Tensor) -> Tensor:
        with fp16():
            logits = lm(x)
        return F.cross_entropy(logits.float().transpose(1, 2), y)

    def train(updates: int) -> None:
        nonlocal best
        for i in range(updates):
            loss = step(*tokens())
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
            scaler.step(opt)
            before = scaler.get_scale()
            scaler.update()
            if i % 5 == 4 and scaler.get_scale() >= before and norm.isfinite():
                with evaluating(lm):
                    best = min(best, step(*tokens()).item())

    return Training(lm, opt, train)
