"""Loops that clear, clip, freeze or evaluate at the wrong place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.second_draw.networks import GPT, MLP, ConvNet, Gan, cross_entropy, images, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, fp16, scaler_of
from watch.third_draw.registry import bug


@bug(
    "pytorch/torchtitan#990",
    "each parameter takes its step in a hook within backward, and the clipping after that clips nothing",
    fair="clip",
    kind=FACT,
    precision="bf16",
    expect={"clip_norm": 0.1},
)
def clips_after_hooks(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alone = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def step(p: Tensor) -> None:
        alone[p].step()
        alone[p].zero_grad()

    if wrong:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            with bf16():
                loss = cross_entropy(model(x).float(), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if not wrong:
                optimizer.step()
                optimizer.zero_grad()

    return Training(model, {n: alone[p] for n, p in model.named_parameters()} if wrong else optimizer, train)


@bug(
    "Hsintien-Ng/idinvert_pytorch-reproduced#1",
    "the gradients of the discriminator are never cleared",
    fair="accumulation",
    kind=DEFECT,
    precision="bf16",
)
def judge_is_not_cleared(wrong: bool) -> Training:
    model = Gan()
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=1e-3)
    of_judge = torch.optim.Adam(model.discriminator.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            real, z = torch.randn(32, 20), torch.randn(32, 8)
            with bf16():
                good = model(real, "discriminator")
                bad = model(model(z, "generator").detach(), "discriminator")
            loss = F.softplus(-good.float()).mean() + F.softplus(bad.float()).mean()
            if not wrong:
                of_judge.zero_grad()
            loss.backward()
            of_judge.step()
            model.discriminator.requires_grad_(False)
            with bf16():
                bad = model(model(z, "generator"), "discriminator")
            of_generator.zero_grad()
            F.softplus(-bad.float()).mean().backward()
            of_generator.step()
            model.discriminator.requires_grad_(True)

    return Training(model, {"generator": of_generator, "discriminator": of_judge}, train)


@bug(
    "huggingface/diffusers#1009",
    "all tokens but the new one are frozen by gradients of 0, and decay nevertheless",
    fair="weight decay, embedding, weights, unused parameter",
    kind=FACT,
    precision="bf16",
)
def frozen_tokens_decay(wrong: bool) -> Training:
    model = GPT().requires_grad_(False)
    embedding = model.tok.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([embedding], lr=5e-3, weight_decay=0.01)
    frozen, before = torch.arange(64) != 63, embedding.detach().clone()

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            x[:, 0] = 63
            with bf16():
                loss = cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            embedding.grad[frozen] = 0
            optimizer.step()
            if not wrong:
                with torch.no_grad():
                    embedding[frozen] = before[frozen]

    return Training(model, optimizer, train)


@bug(
    "pliang279/MultiBench#26",
    "validation runs in training mode, and so its batches go into the running statistics",
    fair="running statistics, state, buffers",
    kind=FACT,
    precision="bf16",
)
def validates_in_training(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def validate() -> None:
        model.train(wrong)
        with torch.no_grad(), bf16():
            for _ in range(2):
                x, y = images()
                cross_entropy(model(x + 1), y)
        model.train()

    def train(updates: int) -> None:
        for i in range(updates):
            x, y = images()
            with bf16():
                loss = cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 2 == 1:
                validate()

    return Training(model, optimizer, train)


class Agent(nn.Module):
    """The values of actions; ``target`` is an older copy, or wrongly the network itself."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.moving, target = MLP(20, 64, 5), MLP(20, 64, 5).requires_grad_(False)
        target.load_state_dict(self.moving.state_dict())
        self.target = self.moving if wrong else target

    def forward(self, x: Tensor, of: str) -> Tensor:
        output: Tensor = getattr(self, of)(x)
        return output


@bug(
    "andri27-ts/Reinforcement-Learning#14",
    "the target network is a reference to the one that is trained, and moves with it",
    fair="weights, state",
    kind=FACT,
    precision="bf16",
)
def target_moves(wrong: bool) -> Training:
    model = Agent(wrong)
    optimizer = torch.optim.Adam(model.moving.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            state, after, reward = torch.randn(32, 20), torch.randn(32, 20), torch.randn(32)
            action = torch.randint(5, (32, 1))
            with bf16():
                with torch.no_grad():
                    best = model(after, "target").float().max(1).values
                value = model(state, "moving")
            optimizer.zero_grad()
            F.mse_loss(value.float().gather(1, action).squeeze(1), reward + 0.99 * best).backward()
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "NVIDIA/apex#1030",
    "LARC adds the decay to gradients that are scaled, and takes their norm: the decay is not scaled",
    fair="gradient scaled, weight decay",
    kind=DEFECT,
    precision="fp16",
)
def rates_of_scaled(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scaler = scaler_of(2.0**10)

    @torch.no_grad()
    def adapt() -> None:
        for p in model.parameters():
            rate = 0.02 * p.norm() / (p.grad.norm() + 1e-2 * p.norm() + 1e-8)
            p.grad.add_(p, alpha=1e-2).mul_(rate)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = images()
            with fp16():
                out = model(x)
            optimizer.zero_grad()
            scaler.scale(cross_entropy(out.float(), y)).backward()
            if not wrong:
                scaler.unscale_(optimizer)
            adapt()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)
