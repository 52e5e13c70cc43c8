"""The rows of ``steps.csv``, one a step: values are kept while steps run, and read when the rows are written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from mpcompare.contract import Batches, Stepper
from mpcompare.entrant.monitor import Monitor
from mpcompare.instruments.clock import Clock
from mpcompare.interrupt import uninterrupted
from mpcompare.records import MONITORED, STEPS, RunRecorder
from mpcompare.tasks.draws import seed_step
from mpcompare.verdict.examine.moves import Digest


@dataclass
class Rows:
    """Takes training steps by the clock, and records each of them."""

    recorder: RunRecorder
    clock: Clock
    clip_norm: float | None
    warmup_steps: int
    begun: int = 0  # the number of steps that were taken before the first of these
    seed: int = 0  # the seed of the run, from which each step begins with random numbers of its own
    digest: Digest | None = None  # looks at the weights after each step, while no clock runs
    written: list[dict[str, Any]] = field(default_factory=list)  # the rows that are on disk
    _waiting: list[dict[str, Any]] = field(default_factory=list)  # steps whose values are not read yet

    def take_step(self, stepper: Stepper, batches: Batches, monitor: Monitor | None = None) -> None:
        """Takes the stepper's next step, through ``monitor`` if there is one, and keeps what it shows."""
        backend = stepper.backend
        before = {"lr": keep(stepper.rates.now), "loss_scale": keep(backend.loss_scale())}
        monitored: dict[str, Any] = {}
        seed_step(self.begun + len(self.written) + len(self._waiting) + 1, self.seed)
        if monitor is not None:
            loss, monitored, pieces = monitor.step(stepper, batches)
        else:
            self.clock.mark()
            loss, pieces = stepper.step(batches), 1
            self.clock.mark()
        if self.digest is not None:
            self.digest.take()
        after = {"loss": keep(loss), "skipped": keep(backend.skipped), "grad_norm": keep(backend.grad_norm)}
        self._waiting.append({**before, **after, **monitored, "pieces": pieces})

    def write(self) -> None:
        """Reads the steps since the last call, which waits for the device, and writes their rows."""
        if not self._waiting:
            return
        with uninterrupted():
            intervals = iter(self.clock.read()[::2])  # every second one lies between two steps; the last may be open
            rows = []
            for number, step in enumerate(self._waiting, start=self.begun + len(self.written) + 1):
                ms = sum(islice(intervals, step["pieces"]))
                numbers = _numbers(step, self.clip_norm)
                rows.append({"step": number, "warmup": number <= self.warmup_steps, **numbers, "step_ms": ms})
            self._waiting.clear()
            self.recorder.append(STEPS, rows)
            self.written += rows


def _numbers(step: Mapping[str, Any], clip_norm: float | None) -> dict[str, Any]:
    """Returns the values of a step as plain numbers. A skipped step clips nothing."""
    norm, skipped = step["grad_norm"], bool(step["skipped"])
    return {
        **{name: float(step[name]) for name in ("loss", "lr", "loss_scale")},
        "skipped": skipped,
        "grad_norm": None if norm is None else float(norm),
        "clipped": clip_norm is not None and norm is not None and not skipped and float(norm) > clip_norm,
        **{name: step.get(name) for name in MONITORED},
    }


def keep(value: float | Tensor | None) -> float | Tensor | None:
    """Returns the value. If it is a tensor on a GPU, returns a copy that is read later.

    The step must not wait for the device, and may overwrite its own tensor.
    """
    if isinstance(value, Tensor):
        return value.clone() if value.is_cuda else value.item()
    return value
