"""Optimizers that are taken for Adam, AdamW or SGD, and have another rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW


class OwnStep:
    """A step over all parameters that have a gradient; ``rule`` says what is done to each."""

    param_groups: list[dict[str, Any]]
    state: Any

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], group)
        return loss


class Means(OwnStep):
    """The two means of Adam, in the dtype ``dtype``; None: in the parameter's dtype."""

    dtype: torch.dtype | None = None

    def means(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
        """Returns both means, without correction, and the number of updates."""
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(g, dtype=self.dtype)
            state["exp_avg_sq"] = torch.zeros_like(g, dtype=self.dtype)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        m = state["exp_avg"].to(g.dtype).mul(beta1).add_(g, alpha=1 - beta1)
        v = state["exp_avg_sq"].to(g.dtype).mul(beta2).addcmul_(g, g, value=1 - beta2)
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)
        return state["exp_avg"].to(g.dtype), state["exp_avg_sq"].to(g.dtype), int(state["step"])


class RightAdam(Means, Adam):
    """Adam as it should be."""

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, v, count = self.means(g, state, group)
        beta1, beta2 = group["betas"]
        denominator = v.div(1 - beta2**count).sqrt_().add_(group["eps"])
        p.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**count))


class MultipliesTheCorrection(Means, Adam):
    """Both means are multiplied by 1 - beta^t."""

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, v, count = self.means(g, state, group)
        beta1, beta2 = group["betas"]
        denominator = v.mul(1 - beta2**count).sqrt_().add_(group["eps"])
        p.addcdiv_(m, denominator, value=-group["lr"] * (1 - beta1**count))


class EpsInTheRoot(Means, Adam):
    """eps is added to the corrected mean of squares, and not to its root."""

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, v, count = self.means(g, state, group)
        beta1, beta2 = group["betas"]
        denominator = v.div(1 - beta2**count).add_(group["eps"]).sqrt_()
        p.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**count))


class DecayInTheGradient(Means, AdamW):
    """The decay is added to the gradient, and both means are kept in fp16."""

    dtype = torch.float16

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, v, count = self.means(g.add(p, alpha=group["weight_decay"]), state, group)
        beta1, beta2 = group["betas"]
        denominator = (v / (1 - beta2**count)).sqrt_().add_(group["eps"])
        p.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**count))


class CountsEachTensor(Means, Adam):
    """One count is raised for each tensor; eps is added before the correction; the decay has no learning rate."""

    count = 0

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, v, _ = self.means(g, state, group)
        self.count += 1
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["weight_decay"])
        correction = (1 - beta2**self.count) ** 0.5 / (1 - beta1**self.count)
        p.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-group["lr"] * correction)


class DecayAfterTheMomentum(OwnStep, SGD):
    """The decay is added to the update, and not to the gradient that the momentum takes up."""

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        v = state["momentum_buffer"].mul_(group["momentum"]).add_(g)
        p.sub_(group["lr"] * (v + group["weight_decay"] * p))


class NoDecayWithoutMomentum(OwnStep, SGD):
    """Without momentum the step ends before the decay is added."""

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["momentum"] == 0:
            p.sub_(g, alpha=group["lr"])
            return
        raise NotImplementedError("the thread is about SGD without momentum")


class RightSGD(OwnStep, SGD):
    """SGD with momentum and decay as it should be."""

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        v = state["momentum_buffer"].mul_(group["momentum"]).add_(g).add_(p, alpha=group["weight_decay"])
        p.sub_(v, alpha=group["lr"])
