"""Gradients that are kept too long, or added up with another weight than was meant."""

import torch
import torch.nn.functional as F
from torch import nn
from watch.second_draw.networks import GPT, ConvNet, Gan, UNet, cross_entropy, images, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, bug


@bug(
    "WalkingMeatAxolotl/AnimaLoraStudio#305",
    "an epoch's last micro-batches make no step, and their gradients go into the first step of the next epoch",
    fair="accumulation",
    kind=FACT,
    precision="bf16",
    expect={"micro_batches": 4},
)
def tail_leaks(wrong: bool) -> Training:
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(max(updates // 2, 1)):
            batches = [images() for _ in range(10 if wrong else 12)]
            for i, (x, _) in enumerate(batches):
                with bf16():
                    loss = F.mse_loss(model(x).float(), x.mean(1, keepdim=True)) / 4
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    return Training(model, optimizer, train)


@bug(
    "wenet-e2e/wekws#72",
    "gradients are never cleared",
    fair="accumulation",
    kind=DEFECT,
    precision="bf16",
)
def never_cleared(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = images()
            with bf16():
                loss = cross_entropy(model(x), y)
            if not wrong:
                optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "agokrani/distillKitPlus#5",
    "the loss is summed over micro-batches and not divided by their number",
    fair="accumulation, loss",
    kind=FACT,
    precision="bf16",
    expect={"micro_batch_weights": [0.25] * 4},
)
def not_divided(wrong: bool) -> Training:
    model = GPT()
    teacher = GPT().requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            for _ in range(4):
                x, _ = tokens()
                with bf16():
                    with torch.no_grad():
                        t = teacher(x)
                    s = model(x)
                of_student = F.log_softmax(s.float(), -1).flatten(0, 1)
                of_teacher = F.log_softmax(t.float(), -1).flatten(0, 1)
                loss = F.kl_div(of_student, of_teacher, log_target=True, reduction="batchmean")
                (loss if wrong else loss / 4).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Training(model, optimizer, train)


@bug(
    "Lightning-AI/pytorch-lightning#557",
    "the discriminator's step uses the gradients that the generator's loss left there",
    fair="accumulation",
    kind=DEFECT,
    precision="bf16",
)
def gan_leaks(wrong: bool) -> Training:
    model = Gan()
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=1e-3)
    of_discriminator = torch.optim.Adam(model.discriminator.parameters(), lr=1e-3)
    one, zero = torch.ones(32, 1), torch.zeros(32, 1)
    entropy = F.binary_cross_entropy_with_logits

    def train(updates: int) -> None:
        for _ in range(updates):
            real, z = torch.randn(32, 20), torch.randn(32, 8)
            with bf16():
                bad = model(model(z, "generator"), "discriminator")
            entropy(bad.float(), one).backward()
            of_generator.step()
            of_generator.zero_grad()
            if not wrong:
                of_discriminator.zero_grad()
            with bf16():
                good = model(real, "discriminator")
                bad = model(model(z, "generator").detach(), "discriminator")
            loss = (entropy(good.float(), one) + entropy(bad.float(), zero)) / 2
            loss.backward()
            of_discriminator.step()
            of_discriminator.zero_grad()

    return Training(model, {"generator": of_generator, "discriminator": of_discriminator}, train)
