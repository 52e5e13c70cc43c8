"""Steps that are taken at the wrong time, with other rates, or by another rule."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from watch.second_draw.networks import GPT, MLP, ConvNet, cross_entropy, images, rows, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, plainly
from watch.third_draw.registry import bug


@bug(
    "espnet/espnet#3283",
    "where the gradients are not finite, the step is left out and they are not cleared: all later ones are NaN, too",
    fair="inf or NaN, accumulation, skip, update left out",
    kind=DEFECT,
    precision="bf16",
)
def keeps_bad_gradients(wrong: bool) -> Training:
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for i in range(2 * updates):
            x, y = rows()
            if i == 4:
                x[0, 0] = torch.inf
            with bf16():
                loss = cross_entropy(model(x).float(), y) / 2
            loss.backward()
            if i % 2 == 1:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                if norm.isfinite():
                    optimizer.step()
                    optimizer.zero_grad()
                elif not wrong:
                    optimizer.zero_grad()

    return Training(model, optimizer, train)


@bug(
    "eriklindernoren/PyTorch-YOLOv3#313",
    "the condition of accumulation is reversed: a step after each batch but every fourth",
    fair="accumulation",
    kind=FACT,
    precision="bf16",
    expect={"micro_batches": 4},
)
def steps_on_the_others(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for i in range(1, 4 * updates + 1):
            x, y = images()
            with bf16():
                loss = cross_entropy(model(x).float(), y)
            loss.backward()
            if bool(i % 4) == wrong:
                optimizer.step()
                optimizer.zero_grad()

    return Training(model, optimizer, train)


@bug(
    "hirofumi0810/neural_sp#168",
    "the loss of a micro-batch is not divided by their number",
    fair="accumulation, loss",
    kind=FACT,
    precision="bf16",
    expect={"micro_batch_weights": [0.25] * 4},
)
def not_divided(wrong: bool) -> Training:
    model = nn.LSTM(20, 32, batch_first=True, proj_size=6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            for _ in range(4):
                x, y = torch.randn(8, 12, 20), torch.randint(6, (8, 12))
                with bf16():
                    out, _ = model(x)
                loss = cross_entropy(out.float(), y)
                (loss if wrong else loss / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()

    return Training(model, optimizer, train)


@bug(
    "pytorch/ignite#583",
    "gradients are cleared just before the fourth micro-batch, after which the step is taken: three of four are lost",
    fair="accumulation",
    kind=FACT,
    precision="bf16",
    expect={"micro_batches": 4},
)
def clears_before_the_last(wrong: bool) -> Training:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(updates: int) -> None:
        for i in range(1, 4 * updates + 1):
            if wrong and i % 4 == 0:
                optimizer.zero_grad()
            x, y = rows()
            with bf16():
                loss = cross_entropy(model(x).float(), y) / 4
            loss.backward()
            if i % 4 == 0:
                optimizer.step()
                if not wrong:
                    optimizer.zero_grad()

    return Training(model, optimizer, train)


class AdamOfPennylane(Optimizer):
    """Adam, as PennyLane writes it."""

    from_zero = True

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if state or self.from_zero:
                    mean, square = state.get("exp_avg", 0.0 * p), state.get("exp_avg_sq", 0.0 * p)
                    state["exp_avg"], state["exp_avg_sq"] = mean.lerp(p.grad, 1 - b1), square.lerp(p.grad**2, 1 - b2)
                else:
                    state["exp_avg"], state["exp_avg_sq"] = p.grad.clone(), p.grad**2
                t = state["step"] = state.get("step", 0) + 1
                rate = group["lr"] * (1 - b2**t) ** 0.5 / (1 - b1**t)
                p.sub_(rate * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


class AdamOfFirstGradient(AdamOfPennylane):
    from_zero = False


for each in (AdamOfPennylane, AdamOfFirstGradient):
    each.__name__ = each.__qualname__ = "Adam"  # both say that they are Adam


@bug(
    "PennyLaneAI/pennylane#1928",
    "the first moments of an Adam are the gradient and its square, and the bias is corrected nevertheless",
    fair="moments, bias correction, optimizer",
    kind=DEFECT,
    precision="bf16",
)
def first_moments(wrong: bool) -> Training:
    model = MLP()
    optimizer = (AdamOfFirstGradient if wrong else AdamOfPennylane)(model.parameters())

    return Training(model, optimizer, plainly(model, optimizer, rows))


class SignSGD(Optimizer):
    """The sign of the momentum."""

    always_new = False

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def init_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if self.always_new or not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.init_group(group)
            for p in group["params"]:
                momentum = self.state[p]["momentum_buffer"]
                momentum.lerp_(p.grad, 1 - group["momentum"])
                p.add_(momentum.sign(), alpha=-group["lr"])


class SignSGDForgets(SignSGD):
    always_new = True


SignSGDForgets.__name__ = SignSGDForgets.__qualname__ = "SignSGD"


@bug(
    "kozistr/pytorch_optimizer#516",
    "a SignSGD makes a new momentum of 0 before each step",
    fair="momentum, moments, optimizer, state",
    kind=DEFECT,
    precision="bf16",
)
def forgets_momentum(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = (SignSGDForgets if wrong else SignSGD)(model.parameters())

    return Training(model, optimizer, plainly(model, optimizer, images))


class AdamOfBf16(Optimizer):
    """Adam for weights in bf16, which computes in fp32."""

    has_masters = True

    def __init__(self, params: Any, lr: float = 6e-4, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                grad, state = p.grad.float(), self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
                    if self.has_masters:
                        state["master"] = p.float()
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - b1)
                state["exp_avg_sq"].lerp_(grad**2, 1 - b2)
                root = (state["exp_avg_sq"] / (1 - b2 ** state["step"])).sqrt() + group["eps"]
                weight = state["master"] if self.has_masters else p.float()
                p.copy_(weight.sub_(group["lr"] * state["exp_avg"] / (1 - b1 ** state["step"]) / root))


class AdamWithoutMasters(AdamOfBf16):
    has_masters = False


for other in (AdamOfBf16, AdamWithoutMasters):
    other.__name__ = other.__qualname__ = "Adam"


@bug(
    "workofart/ml-by-hand#85",
    "Adam writes its updates back to weights in bf16, where those of norms round to nothing",
    fair="no master weights, rounding, weights",
    kind=DEFECT,
    precision="bf16",
    expect={"masters": "fp32"},
)
def without_masters(wrong: bool) -> Training:
    model = GPT().to(torch.bfloat16)
    optimizer = (AdamWithoutMasters if wrong else AdamOfBf16)(model.parameters())

    return Training(model, optimizer, plainly(model, optimizer, tokens))


GROUP = {"parameters": 8, "lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}


@bug(
    "ivadomed/ivadomed#55",
    "the schedule of epochs steps on after each batch",
    fair="schedule, later steps",
    kind=FACT,
    precision="bf16",
    expect={"groups": [GROUP]},
    steps=3,
)
def schedule_in_batches(wrong: bool) -> Training:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def train(updates: int) -> None:
        for _ in range(max(updates // 5, 1)):
            for _ in range(5):
                x, y = rows()
                with bf16():
                    loss = cross_entropy(model(x).float(), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if wrong:
                    schedule.step()
            if not wrong:
                schedule.step()

    return Training(model, optimizer, train)


@bug(
    "h2oai/h2o-llmstudio#663",
    "the schedule steps on after each micro-batch, four times in an update",
    fair="schedule, accumulation, later steps",
    kind=FACT,
    precision="bf16",
    expect={"groups": [{**GROUP, "lr": [1e-3, 5e-4, 2.5e-4]}], "micro_batches": 4},
    steps=3,
)
def schedule_in_micro_batches(wrong: bool) -> Training:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def train(updates: int) -> None:
        for i in range(1, 4 * updates + 1):
            x, y = rows()
            with bf16():
                loss = cross_entropy(model(x).float(), y) / 4
            loss.backward()
            if i % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if wrong or i % 4 == 0:
                schedule.step()

    return Training(model, optimizer, train)


@bug(
    "facebookresearch/BalancingGroups#6",
    "weight decay is of biases and norms alone, and not of all others",
    fair="weight decay, parameter groups",
    kind=FACT,
    precision="bf16",
    expect={"groups": [{**GROUP, "parameters": 3}, {**GROUP, "parameters": 5, "weight_decay": 0.0}]},
)
def decays_the_others(wrong: bool) -> Training:
    model = MLP()
    no_decay = ("bias", "net.1.weight")
    others = [p for n, p in model.named_parameters() if not n.endswith(no_decay)]
    ours = [p for n, p in model.named_parameters() if n.endswith(no_decay)]
    decay, none = (ours, others) if wrong else (others, ours)
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": none, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, rows))
