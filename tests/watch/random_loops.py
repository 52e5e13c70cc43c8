"""Random training loops that are right, in networks, precisions, optimizers, clipping, accumulation and surroundings.

The number of a loop determines all of it. The networks are small. Some networks are in bf16 as a whole: their weights
hardly train, and the watch must say that and nothing else. All others have fp32 weights.
"""

import copy
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from watch.loops.base import DTYPES, Loop
from watch.loops.networks import GPT, mlp

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.LeakyReLU)
OPTIMIZERS: tuple[tuple[type[Optimizer], dict[str, Any]], ...] = (
    (optim.SGD, {"lr": 0.05}),
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"lr": 1e-3}),
    (optim.Adam, {"lr": 1e-3, "weight_decay": 1e-2, "amsgrad": True}),
    (optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    (optim.AdamW, {"lr": 1e-3, "eps": 1e-6, "fused": True}),
    (optim.AdamW, {"lr": 1e-3, "foreach": True}),
    (optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    (optim.Adagrad, {"lr": 1e-2}),
    (optim.NAdam, {"lr": 1e-3}),
    (optim.Adamax, {"lr": 1e-3}),
)


class Recomputed(nn.Module):
    """A block that backward computes once more."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return output


class Residual(nn.Module):
    """An MLP with a norm, dropout and one hidden layer that is called twice. Input: ``(rows, 24)``."""

    def __init__(self, act: type[nn.Module], dropout: float, recompute: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 32), nn.Linear(32, 8)
        block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), act(), nn.Dropout(dropout))
        self.block = Recomputed(block) if recompute else block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = x + self.block(x)
        output: Tensor = self.last(x)
        return output


class ResidualConvolutions(nn.Module):
    """Two convolutions with batch norm, to whose result the input is added. Input and output: ``(rows, 16, h, w)``."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace),
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip
        self.act = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.act(x + self.body(x))
        return output


class Convolutions(nn.Module):
    """A CNN with batch norm or group norm. Input: ``(rows, 3, 12, 12)``. The output is in a dict."""

    def __init__(self, norm: bool, inplace: bool, dropout: float, blocks: int, pool: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8), nn.ReLU(inplace),
            pool(2), nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.BatchNorm2d(16), nn.ReLU(inplace),
            *(ResidualConvolutions(inplace) for _ in range(blocks)),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(dropout),
        )  # fmt: skip
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.last(self.body(x))}


class Recurrent(nn.Module):
    """An embedding and a GRU. Input: tokens ``(rows, 10)``. The output is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.last = nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self.gru(self.tokens(ids))
        return self.last(states[:, -1]), states


class RandomLoop(Loop):
    """The loop that a number determines. ``drawn`` says in words what the loop is made of."""

    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)
        pick = self.draw.choice
        self.drawn: dict[str, Any] = {
            "network": pick(("mlp", "residual", "cnn", "gpt", "gru")),
            "precision": pick(("fp32", "bf16", "bf16", "fp16", "fp16")),
            "dropout": pick((0.0, 0.1)),
            "clip": pick((None, None, 0.1, 1.0, "value", "inf norm")),
            "micro_batches": pick((1, 1, 2, 3)),
            "unequal": pick((False, True)),
            "groups": pick((False, True)),
            "frozen": pick((False, False, True)),
            "ema": pick((None, "average", "copy")),
            "evaluates": pick((False, True)),
            "recompute": pick((False, True)),
            "schedule": pick((None, "cosine", "steps", "warm-up")),
            "cleared": pick(("before", "after", "by the network", "to 0")),
            "scaling": pick(({}, {"init_scale": 2.0**24}, {"init_scale": 64.0, "growth_interval": 2})),
            "smoothing": pick((0.0, 0.1)),
            "optimizer": pick(range(len(OPTIMIZERS))),
            "activation": pick(range(len(ACTIVATIONS))),
            "loss in autocast": pick((False, True)),
            "batch norm": pick((False, True)),
            "blocks": pick((0, 1, 2)),
            "pool": pick((nn.MaxPool2d, nn.AvgPool2d)),
            "tied": pick((False, True)),
            "ignored labels": pick((False, True)),
            "cleared after forward": pick((False, False, True)),
            "weights": pick((*["fp32"] * 5, "bf16")),
        }
        self.name = f"random {number}"
        super().__init__(self.drawn["precision"], number)

    def make_model(self) -> nn.Module:
        drawn = self.drawn
        kind, dropout, act = drawn["network"], drawn["dropout"], ACTIVATIONS[drawn["activation"]]
        if kind == "mlp":
            norm = nn.BatchNorm1d(32) if drawn["batch norm"] else nn.Identity()
            model: nn.Module = nn.Sequential(mlp(24, 32, 32), norm, act(), nn.Dropout(dropout), nn.Linear(32, 8))
        elif kind == "residual":
            model = Residual(act, dropout, drawn["recompute"])
        elif kind == "cnn":
            model = Convolutions(drawn["batch norm"], act is nn.ReLU, dropout, drawn["blocks"], drawn["pool"])
        elif kind == "gpt":
            model = GPT(20, 10, 16, 1 + drawn["blocks"] // 2, dropout)
            if drawn["recompute"]:
                model.blocks = nn.ModuleList(map(Recomputed, model.blocks))
            if not drawn["tied"]:
                model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        else:
            model = Recurrent()
        if drawn["frozen"]:
            next(model.parameters()).requires_grad_(False)
        return model.bfloat16() if self.is_short else model

    @property
    def is_short(self) -> bool:
        """Whether the whole network is in bf16. Then nothing is in autocast."""
        return self.precision == "bf16" and self.drawn["weights"] == "bf16"

    def make_optimizer(self) -> Optimizer:
        kind, settings = OPTIMIZERS[self.drawn["optimizer"]]
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": parameters}]
        if self.drawn["groups"]:
            matrices, vectors = [[p for p in parameters if (p.dim() > 1) == many] for many in (True, False)]
            groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.5 * settings["lr"]}]
        return kind([group for group in groups if group["params"]], **settings)

    def make_scaler(self) -> Any:
        return torch.amp.GradScaler("cpu", enabled=self.precision == "fp16", **self.drawn["scaling"])

    def autocast(self) -> Any:
        return torch.autocast("cpu", DTYPES[self.precision], enabled=self.precision != "fp32" and not self.is_short)

    def micro_batch(self, rows: int) -> tuple[Tensor, Tensor]:
        kind = self.drawn["network"]
        if kind in ("gpt", "gru"):
            ids = self.integers(20, rows, 11)
            target = ids[:, 1:].contiguous() if kind == "gpt" else ids[:, -1] % 8
            if kind == "gpt" and self.drawn["ignored labels"]:
                target[:, 1:].masked_fill_(self.integers(5, rows, 9) == 0, -1)
            return ids[:, :-1], target
        target = self.integers(8, rows)
        shape = (3, 12, 12) if kind == "cnn" else (24,)
        x = self.normal(rows, *shape) + 0.1 * target.view(-1, *[1] * len(shape))
        return x.bfloat16() if self.is_short else x, target

    def micro_batches_of_step(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yields inputs, targets and the weight of each micro-batch's mean loss; the weights add up to 1."""
        number = self.drawn["micro_batches"]
        rows = [4 + 2 * n if self.drawn["unequal"] else 6 for n in range(number)]
        for few in rows:
            yield *self.micro_batch(few), few / sum(rows)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        with self.autocast():
            output = self.model(x, target) if self.drawn["network"] == "gpt" else self.model(x)
            if self.drawn["network"] == "gpt":
                loss: Tensor = output[1]
                return loss
            logits = (
                output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
            )
            if self.drawn["loss in autocast"]:
                return F.cross_entropy(logits, target, label_smoothing=self.drawn["smoothing"])
        return F.cross_entropy(logits.float(), target, label_smoothing=self.drawn["smoothing"])

    def clip(self) -> None:
        parameters, clip = list(self.model.parameters()), self.drawn["clip"]
        if clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        elif clip == "inf norm":
            nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=torch.inf)
        else:
            nn.utils.clip_grad_norm_(parameters, clip)

    def make_schedule(self) -> LRScheduler | None:
        kind = self.drawn["schedule"]
        if kind == "cosine":
            return CosineAnnealingLR(self.optimizer, T_max=30)
        if kind == "steps":
            return StepLR(self.optimizer, step_size=2, gamma=0.5)
        return LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 4)) if kind == "warm-up" else None

    def clear(self) -> None:
        if self.drawn["cleared"] == "by the network":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self.drawn["cleared"] != "to 0")

    def train(self, updates: int) -> None:
        schedule, average = self.make_schedule(), None
        if self.drawn["ema"] == "average":
            average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.model.train()
        for number in range(updates):
            late = self.drawn["cleared after forward"]
            if self.drawn["cleared"] != "after" and not late:
                self.clear()
            for place, (x, target, weight) in enumerate(self.micro_batches_of_step()):
                loss = self.loss(x, target) * weight
                if self.drawn["cleared"] != "after" and late and not place:
                    self.clear()
                self.scaler.scale(loss).backward()
            if self.drawn["clip"] is not None:
                self.scaler.unscale_(self.optimizer)
                self.clip()
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.drawn["cleared"] == "after":
                self.clear()
            if schedule is not None and self.scaler.get_scale() >= before:  # not after a skipped step
                schedule.step()
            if average is not None:
                average.update_parameters(self.model)
            if self.drawn["ema"] == "copy" and number == 1:
                copy.deepcopy(self.model)
            if self.drawn["evaluates"]:
                self.evaluate()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss(*self.micro_batch(4))
        self.model.train()

    @classmethod
    def meant(cls, precision: str) -> dict[str, Any]:
        return {}
