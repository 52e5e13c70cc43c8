"""Gradients are clipped at the wrong time, or not at all."""

import torch
import torch.nn.functional as F
from torch import nn
from watch.second_draw.networks import GPT, MLP, UNet, cross_entropy, images, rows, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, bug, fp16, scaler_of


@bug(
    "rwth-i6/returnn#1595",
    "gradient noise is added and gradients are clipped before they are unscaled",
    fair="clip, gradient scaled",
    kind=DEFECT,
    precision="fp16",
    expect={"clip_norm": 0.5},
)
def clips_scaled(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(2.0**10)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            optimizer.zero_grad()
            with fp16():
                loss = cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if not wrong:
                scaler.unscale_(optimizer)
            for p in model.parameters():
                p.grad += torch.randn_like(p.grad) * 1e-3
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)


@bug(
    "huggingface/transformers#1563",
    "gradients are clipped after each backward of an accumulation, so that earlier micro-batches are clipped again and "
    "again",
    fair="clip, accumulation",
    kind=DEFECT,
    precision="bf16",
    expect={"clip_norm": 0.05, "micro_batch_weights": [0.25] * 4},
)
def clips_each_backward(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            for _ in range(4):
                x, y = tokens()
                with bf16():
                    loss = cross_entropy(model(x), y) / 4
                loss.backward()
                if wrong:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if not wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()

    return Training(model, optimizer, train)


@bug(
    "awslabs/graphstorm#1366",
    "gradients are clipped after the step, which used them unclipped",
    fair="clip",
    kind=DEFECT,
    precision="bf16",
    expect={"clip_norm": 0.1},
)
def clips_after_step(wrong: bool) -> Training:
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            with bf16():
                loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if not wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, 2.0)
            optimizer.step()
            if wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, 2.0)

    return Training(model, optimizer, train)


@bug(
    "pytorch/pytorch#148259",
    "clip_grad_norm_ is given a generator of parameters that was used up before, and clips nothing",
    fair="clip",
    kind=FACT,
    precision="bf16",
    expect={"clip_norm": 0.1},
)
def used_up_generator(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = []

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            optimizer.zero_grad()
            with bf16():
                loss = cross_entropy(model(x), y)
            loss.backward()
            params = model.parameters() if wrong else list(model.parameters())
            log.append(sum(float(p.grad.abs().max()) for p in params))
            nn.utils.clip_grad_norm_(params, 0.1)
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "simchowitzlabpublic/nano-world-model#22",
    "gradients are clipped before the backward of each micro-batch: the last one is never clipped",
    fair="clip, accumulation",
    kind=DEFECT,
    precision="bf16",
    expect={"clip_norm": 0.3},
)
def clips_before_backward(wrong: bool) -> Training:
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            optimizer.zero_grad()
            for _ in range(2):
                x, _ = images()
                with bf16():
                    loss = F.mse_loss(model(x).float(), x.mean(1, keepdim=True)) / 2
                if wrong:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                loss.backward()
            if not wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()

    return Training(model, optimizer, train)
