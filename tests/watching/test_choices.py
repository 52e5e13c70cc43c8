"""``mpcompare.watch`` on networks that choose between their layers, as routers and detectors do."""

import torch
from support.marks import diagonal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.ops import box_iou, nms

import mpcompare


class Router(nn.Module):
    """Each row goes to the two experts of the largest scores."""

    def __init__(self, outputs=10, n=8):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(16, 32), nn.Linear(32, n, bias=False), nn.Linear(32, outputs)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(n))

    def forward(self, x):
        h = self.first(x)
        shares, which = self.gate(h).softmax(-1, dtype=torch.float).topk(2, -1)
        y = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(which == number)
            y.index_add_(0, row, (expert(h[row]) * shares[row, place, None]).to(h.dtype))
        return self.last(h + y)


class Detector(nn.Module):
    """Some boxes that overlap little are compared with a true box, and a random half of them is classified."""

    def __init__(self):
        super().__init__()
        self.first, self.boxes, self.scores = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 1)
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        h = self.first(x).tanh()
        start, size = self.boxes(h).sigmoid().chunk(2, -1)
        boxes = torch.cat([start, start + size], -1)
        kept = nms(boxes.detach().float(), self.scores(h)[:, 0].float(), 0.7)
        overlaps = box_iou(boxes[kept].detach().float(), torch.tensor([[0.5, 0.5, 1.0, 1.0]]))[:, 0]
        good = torch.where(overlaps > overlaps.mean())[0]
        some = kept[good[torch.randperm(len(good))[: len(good) // 2 + 1]]]
        return self.last(h)[some] * self.scores(h)[some] + boxes[some].sum(-1, keepdim=True)


class Recomputed(nn.Module):
    """Two routers, whose choices backward makes once more."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(Router(16, 4) for _ in range(2))
        self.last = nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.last(x)


@diagonal(1, network=[Router, Detector, Recomputed], seed=[0, 1])
def test_choices_of_the_loop_are_made_again(network, seed):
    torch.manual_seed(seed)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with mpcompare.watch(net, optimizer, steps=2) as seen:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = net(torch.randn(256, 16))
                loss = F.cross_entropy(y.float(), torch.randint(10, (len(y),)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    seen.raise_if_wrong()
    assert seen.not_examined == []
    assert seen.sight.blind == []
