"""The precision of a loop whose layers all return fp32, though it computes in 16 bits."""

import torch
from support.marks import diagonal
from torch import Tensor, nn
from torch.nn import functional as F

import mpcompare
from mpcompare.watching.watched import Watch

HALVES = (torch.bfloat16, torch.float16)


class Own(nn.Module):
    """Multiplies within one module, and adds its bias in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 16) / 3), nn.Parameter(torch.randn(16, 5) / 4)
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).tanh() @ self.b + self.bias

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)


class Towers(Own):
    """Multiplies the outputs of two embeddings, which autocast leaves in fp32."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(len(x)) % 20
        return self.users(rows) @ self.items.weight.T + x.mean()


class Bare(Own):
    """The loop itself multiplies, with the parameters of a network that only rectifies."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.relu(x @ self.a + self.bias.mean().expand(16)) @ self.b + self.bias, y)


class WideBelow(Own):
    """Autocast is around the loss alone: the network computes in fp32."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            z = self.body(x)
        return F.cross_entropy(z @ z.detach().T, torch.arange(len(z)))


def watched(make: type[Own], dtype: torch.dtype) -> Watch:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, enabled=dtype is torch.float16)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype):
                loss = model.loss(torch.randn(16, 8), torch.randint(5, (16,)))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return seen


@diagonal(3, make=[Own, Towers, Bare, WideBelow], dtype=HALVES)
def test_a_loop_whose_layers_return_fp32_is_held_to_the_format_that_it_computes_in(make, dtype):
    seen = watched(make, dtype)
    assert (seen.defects, seen.not_examined) == ([], [])
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert seen.facts["precision"] == ("fp32" if make is WideBelow else half)
