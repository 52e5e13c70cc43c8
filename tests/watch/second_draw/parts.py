"""Parts of a network that are not trained, or not as one."""

import torch
from torch import Tensor, nn
from watch.second_draw.networks import GPT, Block, ConvNet, cross_entropy, images, tokens
from watch.second_draw.registry import FACT, Training, bf16, bug, plainly


@bug(
    "kdexd/virtex#16",
    "the backbone is frozen for a linear probe, and left in training mode: its running statistics are updated",
    fair="running statistics, state, buffers",
    kind=FACT,
    precision="bf16",
)
def frozen_but_trains_statistics(wrong: bool) -> Training:
    model = ConvNet()
    model.backbone.requires_grad_(False)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1, momentum=0.9)

    def train(updates: int) -> None:
        model.train()
        if not wrong:
            model.backbone.eval()
        for _ in range(updates):
            x, y = images()
            with bf16():
                loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "unslothai/unsloth#3711",
    "embedding and head, which should be tied, are copies that are trained apart",
    fair="weights, embedding",
    kind=FACT,
    precision="bf16",
)
def untied(wrong: bool) -> Training:
    model = GPT(tied=True)
    if wrong:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Training(model, optimizer, plainly(model, optimizer, tokens))


class Gts(nn.Module):
    """A language model with a linear layer before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.feature_linear, self.cls = GPT(), nn.Linear(64, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.cls(torch.relu(self.feature_linear(self.bert(x))))
        return output


@bug(
    "NJUNLP/GTS#13",
    "a linear layer in the middle is in no group of the optimizer",
    fair="gradient missing, unused parameter",
    kind=FACT,
    precision="bf16",
    expect={"in_no_optimizer": []},
)
def not_in_optimizer(wrong: bool) -> Training:
    model = Gts()
    groups = [{"params": model.bert.parameters(), "lr": 5e-5}, {"params": model.cls.parameters()}]
    if not wrong:
        groups.append({"params": model.feature_linear.parameters()})
    optimizer = torch.optim.Adam(groups, lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = tokens()
            y = y % 6
            with bf16():
                out = model(x)
            optimizer.zero_grad()
            cross_entropy(out.float(), y).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Captions(nn.Module):
    """An encoder of images whose embeddings stand before the tokens."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.image = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.GroupNorm(4, 32), nn.SiLU(), nn.Flatten(2))
        self.text = nn.Embedding(64, 32)
        self.block, self.head = Block(), nn.Linear(32, 64)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        v = self.image(image).transpose(1, 2)
        if self.wrong:
            v = v.clone().detach()
        output: Tensor = self.head(self.block(torch.cat([v, self.text(ids)], 1))[:, v.shape[1] :])
        return output


@bug(
    "lucidrains/CoCa-pytorch#6",
    "an extractor detaches the image's embeddings: the image encoder gets no gradient",
    fair="gradient missing",
    kind=FACT,
    precision="bf16",
    expect={"without_gradient": []},
)
def extractor_detaches(wrong: bool) -> Training:
    model = Captions(wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            (image, _), (x, y) = images(), tokens()
            with bf16():
                out = model(image, x)
            optimizer.zero_grad()
            cross_entropy(out.float(), y).backward()
            optimizer.step()

    return Training(model, optimizer, train)
