"""Training loops as people write them, right and wrong, for the tests of watching."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def small_network(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(32, 16),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.GELU(),
        nn.LayerNorm(32),
        nn.Dropout(dropout),
        nn.Linear(32, 10),
    )


def tokens(rows: int = 32) -> Batch:
    return torch.randint(32, (rows, 4)), torch.randint(10, (rows,))


@dataclass
class Loop:
    """One loop; each attribute is a choice, and what is wrong is a function that the loop calls at a place."""

    make: Callable[[], nn.Module] = small_network
    batch: Callable[[], Batch] = tokens
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=1e-3)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    accumulate: int = 2
    clip: float | None = 0.1
    scale: float = 2.0**12
    updates: int = 3
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    seed: int = 0
    after_backward: Callable[[nn.Module], None] = lambda model: None
    before_step: Callable[[nn.Module], None] = lambda model: None
    after_step: Callable[[nn.Module], None] = lambda model: None
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    made: dict[str, Any] = field(default_factory=dict)

    def run(self, watch: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Trains; returns what ``watch`` yields."""
        torch.manual_seed(self.seed)
        model = self.make().to(self.device)
        called = self.wrap(model)
        optimizer = self.optimizer(model.parameters())
        scaler = torch.amp.GradScaler(self.device, init_scale=self.scale, enabled=self.dtype is torch.float16)
        self.made = {"model": model, "optimizer": optimizer, "scaler": scaler}
        entered = watch(called, optimizer, **options) if watch else contextlib.nullcontext()
        with entered as seen:
            for _ in range(self.updates):
                for _ in range(self.accumulate):
                    x, y = (each.to(self.device) for each in self.batch())
                    with torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not torch.float32):
                        loss = self.loss(called(x), y) / self.accumulate
                    scaler.scale(loss).backward()
                    self.after_backward(model)
                if self.clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                self.before_step(model)
                scaler.step(optimizer)
                scaler.update()
                self.after_step(model)
                optimizer.zero_grad()
        return seen

    def weights(self) -> list[Tensor]:
        return [t.detach().clone() for t in (*self.made["model"].parameters(), *self.made["model"].buffers())]


def spoil(p: nn.Parameter, wrong: Callable[[Tensor], Tensor]) -> None:
    """Lets backward make another gradient of a parameter, where no hook of the parameter tells."""
    node = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda grads: (wrong(grads[0]),))
    p.node = node  # type: ignore[attr-defined] # the graph holds it, and nobody else does
