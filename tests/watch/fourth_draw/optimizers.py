"""Optimizers of one's own that take another step than their rule has it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from watch.fourth_draw.registry import bug
from watch.second_draw.networks import GPT, MLP, ConvNet, images, rows, tokens
from watch.second_draw.registry import DEFECT, Training, plainly


class AdaBound(Optimizer):
    """Adam whose rates are clipped to bounds, which come nearer to each other from step to step."""

    def __init__(self, params: Any, wrong: bool, lr: float = 1e-3, final_lr: float = 0.1, gamma: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "final_lr": final_lr, "gamma": gamma, "betas": (0.9, 0.999), "eps": 1e-8})
        self.wrong = wrong

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                first, second = 1 - b1 ** state["step"], 1 - b2 ** state["step"]
                size = group["lr"] * (1 - second if self.wrong else second) ** 0.5 / first
                lower = group["final_lr"] * (1 - 1 / (group["gamma"] * state["step"] + 1))
                upper = group["final_lr"] * (1 + 1 / (group["gamma"] * state["step"]))
                rate = (size / (state["exp_avg_sq"].sqrt() + group["eps"])).clamp(lower, upper)
                p.sub_(rate * state["exp_avg"])


@bug(
    "kozistr/AdaBound-tensorflow#3",
    "the rate of an AdaBound is corrected by the root of 1 minus the correction and not of the correction",
    fair="bias correction, optimizer, eps, schedule",
    kind=DEFECT,
    precision="bf16",
)
def corrected_by_the_rest(wrong: bool) -> Training:
    model = MLP()
    optimizer = AdaBound(model.parameters(), wrong)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class Adam(Optimizer):
    """Adam for weights in bf16, with masters. Wrongly, it casts its betas to the format of the weights."""

    def __init__(self, params: Any, wrong: bool, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self.wrong = wrong

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                b1, b2 = (float(torch.tensor(b, dtype=p.dtype)) if self.wrong else b for b in group["betas"])
                grad, state = p.grad.float(), self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
                    state["master"] = p.float()
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - b1)
                state["exp_avg_sq"].lerp_(grad**2, 1 - b2)
                root = (state["exp_avg_sq"] / (1 - torch.tensor(b2) ** state["step"])).sqrt() + group["eps"]
                p.copy_(state["master"].sub_(group["lr"] * state["exp_avg"] / (1 - b1 ** state["step"]) / root))


@bug(
    "FluxML/Optimisers.jl#215",
    "Adam casts its betas to the bf16 of its weights: 0.999 becomes 1, the second moment stays 0, and 0/0 is NaN",
    fair="inf or NaN, moments, bias correction, optimizer, precision",
    kind=DEFECT,
    precision="bf16",
    expect={"masters": "fp32"},
)
def betas_in_bf16(wrong: bool) -> Training:
    model = GPT().to(torch.bfloat16)
    optimizer = Adam(model.parameters(), wrong)

    return Training(model, optimizer, plainly(model, optimizer, tokens))


class Nadam(Optimizer):
    """Adam with Nesterov's momentum, as MXNet has it, with the decay in the gradient."""

    def __init__(self, params: Any, wrong: bool, lr: float = 2e-3, weight_decay: float = 0.05) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay, "schedule_decay": 0.004}
        super().__init__(params, defaults)
        self.wrong = wrong

    def decayed(self, p: Tensor, decay: float) -> Tensor:
        return p.grad * (1.0 + decay * p) if self.wrong else p.grad + decay * p  # type: ignore[operator]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                grad, state = self.decayed(p, group["weight_decay"]), self.state[p]
                if not state:
                    state.update(step=0, product=1.0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                t = state["step"] = state["step"] + 1
                now, after = (b1 * (1 - 0.5 * 0.96 ** (n * group["schedule_decay"])) for n in (t, t + 1))
                state["product"] *= now
                state["mean"].lerp_(grad, 1 - b1)
                state["square"].lerp_(grad**2, 1 - b2)
                mean = after * state["mean"] / (1 - state["product"] * after)
                mean = mean + (1 - now) * grad / (1 - state["product"])
                p.sub_(group["lr"] * mean / ((state["square"] / (1 - b2**t)).sqrt() + group["eps"]))


@bug(
    "apache/mxnet#8925",
    "the gradient of a NAdam is multiplied by one plus the decay's term, which should be added to it",
    fair="weight decay, optimizer",
    kind=DEFECT,
    precision="bf16",
)
def decay_is_a_factor(wrong: bool) -> Training:
    model = MLP()
    optimizer = Nadam(model.parameters(), wrong)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class SignSGD(Optimizer):
    """The sign of the momentum, and a decay that is decoupled."""

    def __init__(self, params: Any, wrong: bool, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": weight_decay})
        self.wrong = wrong

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                if not self.wrong:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                momentum.lerp_(p.grad, 1 - group["momentum"])
                p.add_(momentum.sign(), alpha=-group["lr"])


@bug(
    "kozistr/pytorch_optimizer#517",
    "a SignSGD is given a decay, keeps it in its groups, and never applies it",
    fair="weight decay, optimizer",
    kind=DEFECT,
    precision="bf16",
)
def decay_is_not_applied(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = SignSGD(model.parameters(), wrong)

    return Training(model, optimizer, plainly(model, optimizer, images))


class Adagrad(Optimizer):
    """Adagrad with decay, as PaddlePaddle has it. Wrongly, it goes uphill."""

    def __init__(self, params: Any, wrong: bool, lr: float = 1e-2, weight_decay: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "eps": 1e-6, "weight_decay": weight_decay})
        self.sign = 1.0 if wrong else -1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros_like(p))
                total.addcmul_(p.grad, p.grad)
                change = p.grad / (total + group["eps"]).sqrt() + group["weight_decay"] * p
                p.add_(change, alpha=self.sign * group["lr"])


@bug(
    "PaddlePaddle/Paddle#4743",
    "an Adagrad adds its update, which it should subtract: it goes uphill",
    fair="optimizer, gradients, gradient scaled, weight decay",
    kind=DEFECT,
    precision="bf16",
)
def goes_uphill(wrong: bool) -> Training:
    model = MLP()
    optimizer = Adagrad(model.parameters(), wrong)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class LARS(Optimizer):
    """Momentum with a rate for each tensor, by the ratio of its norm to that of its gradient."""

    def __init__(self, params: Any, wrong: bool, lr: float = 0.5, weight_decay: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": weight_decay, "eeta": 2e-2})
        self.wrong = wrong

    def ratio(self, p: Tensor, grad: Tensor, eeta: float) -> Tensor:
        ours, theirs, one = p.norm(), grad.norm(), torch.ones(())
        above = Tensor.ge if self.wrong else Tensor.gt
        return torch.where(above(ours, 0.0), torch.where(theirs.gt(0), eeta * ours / theirs, one), one)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad + group["weight_decay"] * p
                velocity = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(grad * self.ratio(p, grad, group["eeta"]) * group["lr"])
                p.sub_(velocity)


@bug(
    "Spijkervet/SimCLR#27",
    "the ratio of a LARS is 0 where a weight is 0, and should be 1: biases, which begin at 0, are never trained",
    fair="update left out, optimizer, gradient missing, parameter groups",
    kind=DEFECT,
    precision="bf16",
)
def biases_stay_at_zero(wrong: bool) -> Training:
    model = MLP()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
    optimizer = LARS(model.parameters(), wrong)

    return Training(model, optimizer, plainly(model, optimizer, rows))


class Ranger(Optimizer):
    """RAdam with slow weights. It keeps the size of a step for all tensors that are at the same count; wrongly, the
    rate of the first group is in it."""

    def __init__(self, params: Any, wrong: bool, lr: float = 1e-3, k: int = 4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.95, 0.999), "eps": 1e-5})
        self.wrong, self.k = wrong, k
        self.sizes: dict[int, tuple[bool, float]] = {}

    def size(self, t: int, group: dict[str, Any]) -> tuple[bool, float]:
        """Returns whether the second moment is used, and the size of a step without or, wrongly, with the rate."""
        if t not in self.sizes:
            b1, b2 = group["betas"]
            most = 2 / (1 - b2) - 1
            length = most - 2 * t * b2**t / (1 - b2**t)
            size = 1 / (1 - b1**t)
            if length > 5:
                of_variance = (length - 4) / (most - 4) * (length - 2) / length * most / (most - 2)
                size *= ((1 - b2**t) * of_variance) ** 0.5
            self.sizes[t] = length > 5, size * (group["lr"] if self.wrong else 1)
        return self.sizes[t]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p), slow=p.clone())
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - b1)
                state["square"].lerp_(p.grad**2, 1 - b2)
                adapts, size = self.size(state["step"], group)
                root = state["square"].sqrt() + group["eps"] if adapts else 1.0
                p.sub_((1.0 if self.wrong else group["lr"]) * size * state["mean"] / root)
                if state["step"] % self.k == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


@bug(
    "lessw2020/Ranger-Deep-Learning-Optimizer#9",
    "a RAdam keeps the size of its step with the rate in it: the second group trains at the rate of the first",
    fair="parameter groups, optimizer, schedule",
    kind=DEFECT,
    precision="bf16",
)
def rate_of_the_first_group(wrong: bool) -> Training:
    model = MLP()
    groups = [{"params": model.net[:5].parameters()}, {"params": model.net[5].parameters(), "lr": 1e-2}]
    optimizer = Ranger(groups, wrong)

    return Training(model, optimizer, plainly(model, optimizer, rows))
