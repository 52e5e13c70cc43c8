"""Careful loops that stand for the defects of optimizers and updates. All of them are right."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from watch.fourth_draw.registry import careful
from watch.fourth_draw.updates import Policy, copy_stochastic
from watch.second_draw.networks import GPT, MLP, ConvNet, cross_entropy, images, rows, tokens
from watch.second_draw.registry import Training, bf16


@dataclass
class Config:
    """The settings of a run."""

    lr: float = 1e-3
    warmup: int = 3
    total: int = 40
    decay: float = 0.05
    log_every: int = 4
    history: list[dict[str, float]] = field(default_factory=list)


@torch.no_grad()
def evaluate(net: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]) -> float:
    """Returns the share of right classes of a batch, and leaves the network as it was."""
    was = net.training
    net.eval()
    inputs, labels = batch()
    with bf16():
        right = (net(inputs).argmax(-1) == labels).float().mean().item()
    net.train(was)
    return right


def decay_groups(net: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Returns groups with decay for matrices, and without for vectors."""
    matrices = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in net.parameters() if p.requires_grad and p.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


@careful("chainer/chainer#261", "hooks of one's own change the gradients before each step, as in Chainer")
def hooked_updates() -> Training:
    net, cfg = ConvNet(), Config(lr=0.05)
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True)
    sched = StepLR(opt, step_size=6, gamma=0.5)

    def weight_decay(params: list[nn.Parameter]) -> None:
        for p in params:
            if p.ndim > 1 and p.grad is not None:
                p.grad.add_(p.data, alpha=5e-4)

    def clip(params: list[nn.Parameter]) -> None:
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        if norm > 1.0:
            for p in params:
                p.grad.mul_(1.0 / norm)  # type: ignore[union-attr]

    hooks = [weight_decay, clip]

    def update(x: Tensor, t: Tensor) -> float:
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), t)
        loss.backward()
        for hook in hooks:
            hook(list(net.parameters()))
        opt.step()
        sched.step()
        return loss.item()

    def train(updates: int) -> None:
        for i in range(updates):
            value = update(*images())
            if i % cfg.log_every == 0:
                cfg.history.append({"loss": value, "accuracy": evaluate(net, images)})

    return Training(net, opt, train)


class AdaBoundOfLuo(Optimizer):
    """AdaBound as its authors wrote it: the bounds follow the schedule of the rate."""

    def __init__(self, params: Any, lr: float = 1e-3, final_lr: float = 0.1, weight_decay: float = 0.0) -> None:
        defaults = {"lr": lr, "final_lr": final_lr, "gamma": 1e-3, "weight_decay": weight_decay, "amsbound": True}
        super().__init__(params, defaults)
        self.base_lrs = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, base_lr in zip(self.param_groups, self.base_lrs, strict=True):
            for p in (p for p in group["params"] if p.grad is not None):
                grad, state = p.grad, self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"], state["max"] = (torch.zeros_like(p) for _ in range(3))
                state["step"] += 1
                if group["weight_decay"]:
                    grad = grad.add(p, alpha=group["weight_decay"])
                state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
                torch.maximum(state["max"], state["exp_avg_sq"], out=state["max"])
                denom = state["max"].sqrt().add_(1e-8)
                size = group["lr"] * math.sqrt(1 - 0.999 ** state["step"]) / (1 - 0.9 ** state["step"])
                final = group["final_lr"] * group["lr"] / base_lr
                low = final * (1 - 1 / (group["gamma"] * state["step"] + 1))
                high = final * (1 + 1 / (group["gamma"] * state["step"]))
                p.add_(-torch.full_like(denom, size).div_(denom).clamp_(low, high).mul_(state["exp_avg"]))
        return loss


@careful("kozistr/AdaBound-tensorflow#3", "the step takes a closure, and the bounds follow a schedule")
def closures() -> Training:
    net, cfg = MLP(), Config(lr=3e-3)
    opt = AdaBoundOfLuo(decay_groups(net, cfg.decay), lr=cfg.lr)
    sched = LambdaLR(opt, lambda i: min(1.0, (i + 1) / cfg.warmup))
    data = TensorDataset(torch.randn(256, 20), torch.randint(5, (256,)))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from DataLoader(data, batch_size=32, shuffle=True, drop_last=True)

    loader = batches()

    def train(updates: int) -> None:
        for _ in range(updates):
            xb, yb = next(loader)

            def closure(xb: Tensor = xb, yb: Tensor = yb) -> Tensor:
                opt.zero_grad(set_to_none=False)
                with bf16():
                    logits = net(xb)
                loss = F.cross_entropy(logits.float(), yb, label_smoothing=0.1)
                loss.backward()
                return loss

            cfg.history.append({"loss": float(opt.step(closure))})
            sched.step()

    return Training(net, opt, train)


class AnyPrecisionAdamW(Optimizer):
    """AdamW of weights in bf16, with a buffer of what their roundings left out (Kahan's sum)."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                    state["compensation"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["step"] += 1
                grad = p.grad.float()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                size = group["lr"] / (1 - beta1 ** state["step"])
                root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                carried = state["compensation"]
                carried.copy_(carried - size * state["exp_avg"] / root)
                before = p.clone()
                p.add_(carried)
                carried.add_(before.sub_(p))


@careful("FluxML/Optimisers.jl#215", "weights are in bf16 without masters, and a buffer keeps what roundings leave out")
def kahan() -> Training:
    lm = GPT().bfloat16()
    opt = AnyPrecisionAdamW(lm.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        lm.train()
        for _ in range(updates):
            ids, labels = tokens()
            opt.zero_grad(set_to_none=True)
            logits = lm(ids)
            cross_entropy(logits.float(), labels).backward()
            opt.step()

    return Training(lm, opt, train)


@careful("apache/mxnet#8925", "the sum of the losses goes backward, and the gradients are rescaled by the batch")
def rescaled_sums() -> Training:
    net, cfg = MLP(), Config()
    opt = torch.optim.NAdam(
        decay_groups(net, cfg.decay), lr=cfg.lr, momentum_decay=4e-3, decoupled_weight_decay=True, foreach=False
    )
    sched = OneCycleLR(opt, max_lr=2e-3, total_steps=cfg.total, cycle_momentum=False)
    criterion = nn.CrossEntropyLoss(reduction="sum")

    def train(updates: int) -> None:
        for step in range(updates):
            features, labels = rows()
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                scores = net(features)
            total = criterion(scores.float(), labels)
            total.backward()
            rescale = 1.0 / len(labels)
            for p in net.parameters():
                p.grad.data *= rescale
            opt.step()
            opt.zero_grad()
            sched.step()
            if (step + 1) % cfg.log_every == 0:
                cfg.history.append({"loss": total.item() * rescale, "rate": sched.get_last_lr()[0]})

    return Training(net, opt, train)


class Tiger(Optimizer):
    """The sign of a momentum and a decoupled decay, for all tensors of a group at once."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.965, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            means = [self.state[p]["exp_avg"] for p in params]
            torch._foreach_lerp_(means, [p.grad for p in params], 1 - group["beta"])
            if group["weight_decay"] > 0:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, torch._foreach_sign(means), alpha=-group["lr"])


@careful("kozistr/pytorch_optimizer#517", "an optimizer for all tensors at once, and two micro-batches of images")
def all_at_once() -> Training:
    net, cfg = ConvNet(), Config(lr=5e-4)
    opt = Tiger(decay_groups(net, 0.1), lr=cfg.lr)
    sched = CosineAnnealingLR(opt, T_max=cfg.total)
    accumulate = 2

    def train(updates: int) -> None:
        seen = 0
        for micro in range(updates * accumulate):
            picture, kind = images()
            with bf16():
                guess = net(picture)
            loss = cross_entropy(guess.float(), kind) / accumulate
            loss.backward()
            seen += len(kind)
            if (micro + 1) % accumulate == 0:
                opt.step()
                sched.step()
                opt.zero_grad()
        cfg.history.append({"seen": seen, "accuracy": evaluate(net, images)})

    return Training(net, opt, train)


@careful("PaddlePaddle/Paddle#4743", "the likelihood is maximized, and so the optimizer goes uphill as it should")
def maximizes() -> Training:
    net, cfg = MLP(), Config(lr=2e-2)
    opt = torch.optim.Adagrad(net.parameters(), lr=cfg.lr, lr_decay=1e-3, weight_decay=1e-4, maximize=True)

    def log_likelihood(scores: Tensor, labels: Tensor) -> Tensor:
        return scores.float().log_softmax(-1).gather(1, labels.unsqueeze(1)).mean()

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            opt.zero_grad()
            with bf16():
                scores = net(x)
            objective = log_likelihood(scores, y)
            objective.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
            cfg.history.append({"likelihood": objective.item()})

    return Training(net, opt, train)


class LayerwiseSGD(Optimizer):
    """LARS, which leaves biases and norms out of its ratios and of its decay."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 1e-4, trust: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.9, "trust": trust})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                d = p.grad
                if p.ndim > 1:
                    d = d.add(p, alpha=g["weight_decay"])
                    weight, grad = torch.linalg.vector_norm(p), torch.linalg.vector_norm(d)
                    if weight > 0 and grad > 0:
                        d = d * (g["trust"] * weight / grad)
                buf = self.state[p].get("mu")
                if buf is None:
                    buf = self.state[p]["mu"] = torch.zeros_like(p)
                buf.mul_(g["momentum"]).add_(d)
                p.add_(buf, alpha=-g["lr"])


def nt_xent(a: Tensor, b: Tensor, temperature: float = 0.5) -> Tensor:
    """Returns the contrast of two views, with the mask of a view with itself."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(-torch.inf)
    partner = torch.arange(len(z)).roll(len(a))
    return F.cross_entropy(sim, partner)


@careful("Spijkervet/SimCLR#27", "two views are contrasted, and a rate for each layer follows a warmup by hand")
def two_views() -> Training:
    net, cfg = ConvNet(), Config(lr=0.3)
    nn.init.zeros_(net.fc.bias)
    opt = LayerwiseSGD(net.parameters(), lr=0.0)

    def rate(step: int) -> float:
        if step < cfg.warmup:
            return cfg.lr * (step + 1) / cfg.warmup
        return cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - cfg.warmup) / (cfg.total - cfg.warmup)))

    def augment(x: Tensor) -> Tensor:
        return x.flip(-1) + 0.1 * torch.randn_like(x) if torch.rand(()) < 0.5 else x + 0.1 * torch.randn_like(x)

    def train(updates: int) -> None:
        for step in range(updates):
            for group in opt.param_groups:
                group["lr"] = rate(step)
            x, _ = images()
            with bf16():
                first, second = net(torch.cat([augment(x), augment(x)])).chunk(2)
            loss = nt_xent(first.float(), second.float())
            opt.zero_grad()
            loss.backward()
            opt.step()

    return Training(net, opt, train)


class Lookahead(Optimizer):
    """Slow weights around another optimizer, whose groups it shares."""

    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in optimizer.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.optimizer.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p - s, alpha=self.alpha)
                    p.copy_(s)


@careful("lessw2020/Ranger-Deep-Learning-Optimizer#9", "slow weights are drawn after every third step of a RAdam")
def lookahead() -> Training:
    net = MLP()
    head = list(net.net[5].parameters())
    body = [p for p in net.parameters() if all(p is not q for q in head)]
    radam = torch.optim.RAdam([{"params": body, "lr": 1e-3}, {"params": head, "lr": 1e-2}])
    opt = Lookahead(radam, k=3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            with bf16():
                loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return Training(net, opt, train)


class Masters:
    """Copies of the weights in fp32, which an optimizer trains, and which are rounded by chance into the weights."""

    def __init__(self, net: nn.Module) -> None:
        self.working = list(net.parameters())
        self.copies = [nn.Parameter(p.detach().float()) for p in self.working]

    def take_gradients(self) -> None:
        for copy, p in zip(self.copies, self.working, strict=True):
            copy.grad = None if p.grad is None else p.grad.float()
            p.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        for copy, p in zip(self.copies, self.working, strict=True):
            copy_stochastic(p, copy.detach())


@careful(
    "Nerogar/OneTrainer#994",
    "torch's Adafactor trains masters of one's own, which are rounded into the weights by chance",
)
def masters_by_chance() -> Training:
    lm = GPT().to(torch.bfloat16)
    masters = Masters(lm)
    opt = torch.optim.Adafactor(masters.copies, lr=1e-2)

    def train(updates: int) -> None:
        for _ in range(updates):
            ids, labels = tokens()
            cross_entropy(lm(ids).float(), labels).backward()
            masters.take_gradients()
            nn.utils.clip_grad_norm_(masters.copies, 1.0)
            opt.step()
            masters.give_weights()

    return Training(lm, opt, train)


@careful("pytorch/pytorch#187268", "hooks make the gradients of earlier layers smaller, and are removed at the end")
def layerwise_hooks() -> Training:
    net = ConvNet()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)

    def scale_by(factor: float) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            assert param.grad is not None
            param.grad = param.grad * factor

        return hook

    def layers() -> Iterable[tuple[float, nn.Module]]:
        depth = len(net.backbone)
        return ((0.9 ** (depth - i), layer) for i, layer in enumerate(net.backbone))

    def train(updates: int) -> None:
        handles = [
            p.register_post_accumulate_grad_hook(scale_by(factor))
            for factor, layer in layers()
            for p in layer.parameters()
        ]
        for _ in range(updates):
            x, y = images()
            with bf16():
                out = net(x)
            loss = cross_entropy(out.float(), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        for handle in handles:
            handle.remove()

    return Training(net, opt, train)


@careful("huggingface/trl#6688", "a rollout is given merged weights by a call, and the network keeps its own")
def merged_for_a_call() -> Training:
    policy = Policy()
    opt = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=5e-3)
    baseline = 0.0

    def merged() -> dict[str, Tensor]:
        state = {name: value.detach() for name, value in policy.state_dict().items()}
        for name in ("first", "last"):
            weight = state[f"{name}.base.weight"].float() + state[f"{name}.b"] @ state[f"{name}.a"]
            state[f"{name}.base.weight"] = weight.to(torch.bfloat16)
            state[f"{name}.b"] = torch.zeros_like(state[f"{name}.b"])
        return state

    def train(updates: int) -> None:
        nonlocal baseline
        for _ in range(updates):
            seen = torch.randn(32, 20)
            with torch.no_grad(), bf16():
                action = functional_call(policy, merged(), (seen,)).float().argmax(-1)
            reward = (action == seen[:, :5].argmax(-1)).float()
            baseline = 0.9 * baseline + 0.1 * reward.mean().item()
            with bf16():
                scores = policy(seen)
            chosen = scores.float().log_softmax(-1).gather(1, action[:, None]).squeeze(1)
            opt.zero_grad()
            (-(reward - baseline) * chosen).mean().backward()
            opt.step()

    return Training(policy, opt, train)
