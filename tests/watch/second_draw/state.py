"""State that is kept from step to step: moments and the mode."""

import torch
import torch.nn.functional as F
from watch.second_draw.networks import GPT, ConvNet, UNet, cross_entropy, images, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, bug


@bug(
    "KempnerInstitute/KempnerForge#115",
    "a resumed run has its weights and schedule, and an AdamW without moments",
    fair="resume, moments, bias correction",
    kind=FACT,
    precision="bf16",
)
def resumes_without_moments(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            optimizer.zero_grad()
            with bf16():
                loss = cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()

    train(10)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    model = GPT()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if wrong:  # only what a fresh optimizer's state_dict has is loaded
        saved["optimizer"]["state"] = {}
    optimizer.load_state_dict(saved["optimizer"])
    return Training(model, optimizer, train)


@bug(
    "alan-turing-institute/deepsensor#47",
    "each epoch makes a new Adam, whose moments begin at 0",
    fair="moments, bias correction",
    kind=FACT,
    precision="bf16",
)
def new_adam_each_epoch(wrong: bool) -> Training:
    model = UNet()
    first = optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        nonlocal optimizer
        for _ in range(max(updates // 3, 1)):
            if wrong:
                optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            for _ in range(3):
                x, _ = images()
                with bf16():
                    out = model(x)
                optimizer.zero_grad()
                F.mse_loss(out.float(), x.mean(1, keepdim=True)).backward()
                optimizer.step()

    return Training(model, first, train)


@bug(
    "wkentaro/pytorch-fcn#57",
    "validation in the middle of an epoch leaves the network in evaluation mode",
    fair="state, dropout, running statistics, later steps, run",
    kind=DEFECT,
    precision="bf16",
    expect={"training_mode": True},
    steps=8,
)
def stays_in_evaluation(wrong: bool) -> Training:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def validate() -> None:
        model.eval()
        with torch.no_grad(), bf16():
            for _ in range(2):
                x, y = images()
                cross_entropy(model(x), y)

    def train(updates: int) -> None:
        model.train()
        for i in range(updates):
            if i % 4 == 3:
                validate()
                if not wrong:
                    model.train()
            x, y = images()
            with bf16():
                loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)
