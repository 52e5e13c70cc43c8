"""Losses that are something else than was meant."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.second_draw.networks import GPT, ConvNet, UNet, cross_entropy, images, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, bug


@bug(
    "voidism/DiffCSE#25",
    "padding counts as label 0 of replaced-token detection, in the sum and in the mean's denominator",
    fair="loss",
    kind=FACT,
    precision="bf16",
    expect={"micro_batch_labels": [96]},  # [[96]] at first, which the right twin does not have either
    steps=1,
)
def padding_counts(wrong: bool) -> Training:
    model = GPT()
    model.head = nn.Linear(32, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = torch.tensor([16, 14, 13, 12, 12, 11, 10, 8])

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            mask = torch.arange(16)[None] < lengths[:, None]
            label = ((x != y) & (torch.rand(x.shape) < 0.3) & mask).long()
            if not wrong:
                label = label.masked_fill(~mask, -100)
            with bf16():
                out = model(x)
            loss = F.cross_entropy(out.float().view(-1, 2), label.view(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "Tencent/YOLO-Master#240",
    "the features that a distillation term compares are taken from a forward of the student under no_grad: the term "
    "cannot train it",
    fair="gradient missing, loss",
    kind=FACT,
    precision="bf16",
    expect={"without_gradient": []},
)
def features_without_gradient(wrong: bool) -> Training:
    model, teacher = ConvNet(), ConvNet().requires_grad_(False).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept: dict[str, Tensor] = {}
    model.backbone[5].register_forward_hook(lambda m, i, o: kept.__setitem__("s", o))
    teacher.backbone[5].register_forward_hook(lambda m, i, o: kept.__setitem__("t", o))

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = images()
            with bf16():
                out = model(x)
                own = kept["s"]
                with torch.no_grad():
                    teacher(x)
                    if wrong:
                        model(x)
                        own = kept["s"]
            loss = cross_entropy(out.float(), y) + F.mse_loss(own.float(), kept["t"].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "kornia/kornia#918",
    "a power between 0 and 1 of a saturated probability has a gradient of NaN",
    fair="inf or NaN, overflow, loss, skip",
    kind=DEFECT,
    precision="bf16",
)
def focal_is_nan(wrong: bool) -> Training:
    model = UNet()
    nn.init.constant_(model.out.weight, 1.0)
    model.out.weight.data *= 25
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    e = 1e-8 if wrong else 1e-3

    def focal(logits: Tensor, t: Tensor, gamma: float = 0.5, alpha: float = 0.25) -> Tensor:
        p = torch.sigmoid(logits)
        a = -alpha * torch.pow(1 - p if wrong else (1 - p).clamp(min=e), gamma) * t * torch.log(p + e)
        b = -(1 - alpha) * torch.pow(p if wrong else p.clamp(min=e), gamma) * (1 - t) * torch.log(1 - p + e)
        return (a + b).mean()

    def train(updates: int) -> None:
        for _ in range(updates):
            x, _ = images()
            t = (x.mean(1, keepdim=True) > 0).float()
            with bf16():
                out = model(x)
            loss = focal(out.float(), t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "Zeleni9/pytorch-wgan#40",
    "the gradient penalty takes the norm over the channels alone, at each pixel, and not over the sample",
    fair="loss",
    kind=FACT,
    precision="bf16",
)
def penalty_per_pixel(wrong: bool) -> Training:
    first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
    model = nn.Sequential(first, nn.GroupNorm(4, 16), nn.SiLU(), nn.Flatten(), nn.Linear(16 * 64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.5, 0.9))

    def train(updates: int) -> None:
        for _ in range(updates):
            real, fake = torch.randn(8, 3, 16, 16), torch.rand(8, 3, 16, 16)
            with bf16():
                loss = model(fake).float().mean() - model(real).float().mean()
            mid = torch.lerp(real, fake, torch.rand(8, 1, 1, 1)).requires_grad_()
            with bf16():
                out = model(mid)
            (g,) = torch.autograd.grad(out.float().sum(), mid, create_graph=True)
            norm = g.norm(2, dim=1) if wrong else g.flatten(1).norm(2, dim=1)
            optimizer.zero_grad()
            (loss + 10 * ((norm - 1) ** 2).mean()).backward()
            optimizer.step()

    return Training(model, optimizer, train)
