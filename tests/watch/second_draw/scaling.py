"""The loss scale, and what a scaler should skip."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.second_draw.networks import GPT, MLP, ConvNet, Gan, cross_entropy, images, rows, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bug, fp16, scaler_of


@bug(
    "IAHispano/Applio#860",
    "after scaler.step the optimizers take a step of their own",
    fair="update again, skip, gradient scaled",
    kind=DEFECT,
    precision="fp16",
)
def steps_twice(wrong: bool) -> Training:
    model = Gan()
    of_generator = torch.optim.AdamW(model.generator.parameters(), lr=1e-3)
    of_discriminator = torch.optim.AdamW(model.discriminator.parameters(), lr=1e-3)
    scaler = scaler_of(256.0)

    def train(updates: int) -> None:
        for _ in range(updates):
            real = torch.randn(32, 20)
            with fp16():
                fake = model(torch.randn(32, 8), "generator")
            with fp16():
                good, bad = model(real, "discriminator"), model(fake.detach(), "discriminator")
            loss = F.mse_loss(good.float(), torch.ones(32, 1)) + bad.float().square().mean()
            of_discriminator.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(of_discriminator)
            scaler.step(of_discriminator)
            if wrong:
                of_discriminator.step()
            with fp16():
                bad = model(fake, "discriminator")
            loss = F.mse_loss(bad.float(), torch.ones(32, 1))
            of_generator.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(of_generator)
            scaler.step(of_generator)
            if wrong:
                of_generator.step()
            scaler.update()

    return Training(model, {"generator": of_generator, "discriminator": of_discriminator}, train)


class Two(nn.Module):
    """An encoder and a decoder, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = MLP(20, 64, 16), MLP(16, 64, 20)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.decoder(self.encoder(x))
        return output


@bug(
    "huggingface/accelerate#439",
    "the scaler is updated after each of two optimizers: where the scale grows between them, the second one divides by "
    "the new scale",
    fair="gradient scaled, loss scale",
    kind=DEFECT,
    precision="fp16",
)
def updates_scaler_twice(wrong: bool) -> Training:
    model = Two()
    of_encoder = torch.optim.AdamW(model.encoder.parameters(), lr=1e-3)
    of_decoder = torch.optim.AdamW(model.decoder.parameters(), lr=1e-3)
    scaler = scaler_of(64.0, growth_interval=3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, _ = rows()
            of_encoder.zero_grad()
            of_decoder.zero_grad()
            with fp16():
                out = model(x)
            scaler.scale(F.mse_loss(out.float(), x)).backward()
            scaler.step(of_encoder)
            if wrong:
                scaler.update()
            scaler.step(of_decoder)
            scaler.update()

    return Training(model, {"encoder": of_encoder, "decoder": of_decoder}, train)


@bug(
    "huggingface/accelerate#134",
    "the outputs stay fp16, and the loss is computed outside autocast, in fp16",
    fair="loss, precision",
    kind=FACT,
    precision="fp16",
    expect={"loss_in_16_bits": []},
)
def loss_in_fp16(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = scaler_of(256.0)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = images()
            with fp16():
                out = model(x)
            loss = F.cross_entropy(out if wrong else out.float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)


GROUP = {"parameters": 8, "lr": [1e-4, 2e-4, 3e-4], "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}


@bug(
    "huggingface/transformers#11144",
    "the schedule steps on, too, where the scaler skipped the optimizer's step",
    fair="later steps, skip, loss scale",
    kind=FACT,
    precision="fp16",
    expect={"groups": [GROUP]},
    steps=3,
)
def schedule_on_skipped(wrong: bool) -> Training:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(2.0**22)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1.0))

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            optimizer.zero_grad()
            with fp16():
                out = model(x)
            scaler.scale(cross_entropy(out.float(), y)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if wrong or scaler.get_scale() >= before:
                schedule.step()

    return Training(model, optimizer, train)


@bug(
    "Lightning-AI/pytorch-lightning#4956",
    "gradients that overflowed are set to 0 before the scaler sees them: it never lowers its scale, and the step is "
    "taken with decay and momentum alone",
    fair="skip, gradient missing, loss scale",
    kind=DEFECT,
    precision="fp16",
)
def zeroes_overflow(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(2.0**18)

    def train(updates: int) -> None:
        for i in range(updates):
            x, y = tokens()
            optimizer.zero_grad()
            with fp16():
                out = model(x)
            scaler.scale(cross_entropy(out.float(), y) * (64.0 if i % 3 == 1 else 1.0)).backward()
            if wrong and not all(p.grad.isfinite().all() for p in model.parameters()):
                for p in model.parameters():
                    p.grad.zero_()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)
