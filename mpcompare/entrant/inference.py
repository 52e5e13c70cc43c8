"""What is the trained network worth in each precision? Forward only, from its master parameters.

way              what computes
autocast BITS    ``torch.autocast`` around the fp32 module, which casts its weights in every call
BITS weights     the module cast once, by the rules of tasks/cast.py: norms and embeddings stay in fp32
fp32             the module as it is, in IEEE fp32
tf32             the same with TF32 allowed, of a run in that precision

BITS are those of the run; of one in fp32 or TF32 those that ``precision=auto`` would choose on this device. How exact a
way is depends on who trained, and every run says it of its own weights. What it costs does not: the entrants of a race
share that.
"""

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpcompare.contract import State
from mpcompare.dtypes import torch_dtype
from mpcompare.entrant.evaluation import Scores, score
from mpcompare.entrant.setup import Setup
from mpcompare.instruments import machine, meter
from mpcompare.instruments.clock import Clock
from mpcompare.precision import PRECISIONS, preferred
from mpcompare.shared import Shared
from mpcompare.tasks.cast import cast_module
from mpcompare.tasks.task import with_values

MIN_BATCHES = 3  # timed ones of each way, also where the time is spent after the first
Forward = Callable[[Tensor], Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A network, ready to be called.

    Attributes:
        forward: of inputs as the data set holds them.
        network: which holds the weights.
        tf32: whether its products may round to TF32.
    """

    forward: Forward
    network: nn.Module
    tf32: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        with torch.inference_mode(), machine.tf32(self.tf32):
            return self.forward(x)

    @property
    def weight_bytes(self) -> int:
        """Of parameters and buffers; tied ones once."""
        tensors = {id(t): t.nbytes for t in itertools.chain(self.network.parameters(), self.network.buffers())}
        return sum(tensors.values())


def autocast(network: nn.Module, dtype: torch.dtype) -> Way:
    """As the recipe of ``torch.amp`` has it for inference."""
    device_type = next(network.parameters()).device.type

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype=dtype):
            return network(x)

    return Way(forward, network)


def cast_weights(network: nn.Module, dtype: torch.dtype) -> Way:
    """A copy in 16 bits; its inputs are cast in every call."""
    network = copy.deepcopy(network)
    cast_module(network, dtype)
    return Way(lambda x: network(x.to(dtype) if x.is_floating_point() else x), network)


def ways(precision: str, device: torch.device) -> dict[str, Callable[[nn.Module], Way]]:
    """By name what makes each of a network in evaluation mode, which it does not change.

    Args:
        precision: of the run, resolved.
    """
    trained = PRECISIONS[precision]
    bits = (trained if trained.is_16_bit else preferred(device)).storage
    found: dict[str, Callable[[nn.Module], Way]] = {
        f"autocast {bits.name}": partial(autocast, dtype=torch_dtype(bits)),
        f"{bits.name} weights": partial(cast_weights, dtype=torch_dtype(bits)),
        "fp32": lambda network: Way(network, network),
    }
    if trained.uses_tf32:
        found["tf32"] = lambda network: Way(network, network, tf32=True)
    return found


def measure_inference(
    setup: Setup, state: State, scores: Scores, budget_s: float, batch_size: int | None, shared: Shared
) -> dict[str, Any]:
    """Each way beside the others.

    Args:
        state: of the trained backend.
        scores: what evaluating it has found, which is the fp32 way's.
        budget_s: seconds for timed batches; at least MIN_BATCHES of each way are timed.
        batch_size: rows of such a batch; None: those of a training step's micro-batch.

    Returns:
        ``batch_size``; ``seconds`` that it took; ``batches`` that were timed of each way; and by name the ``ways``:
        ``test_loss`` and ``test_accuracy`` on all held-out samples, ``latency_ms`` of a batch (the median, and
        ``latency_ms_p20`` and ``latency_ms_p80``), ``samples_per_s``, ``weight_bytes`` and ``peak_memory_bytes``:
        weights, batch, and the most that a call had allocated beside them. Of one that cannot be had here only
        ``unavailable``, the reason in a line.
    """
    start = time.monotonic()
    network = with_values(setup.model, state["params"], state["buffers"]).eval()
    rows = batch_size or setup.task.micro_batch_size
    made: dict[str, Way] = {}
    found: dict[str, Row] = {}
    for name, make in ways(setup.precision, setup.device).items():
        try:
            way = make(network)
            found[name] = dict(scores) if name == "fp32" else dict(_score(way, setup))
            made[name] = way
        except Exception as error:  # a user's network may raise anything where it meets another dtype
            found[name] = _unavailable(error)
    key = "-".join(["inference", str(rows), *made]).replace(" ", "_")
    costs = shared.once(key, lambda: _costs(made, _batch(setup, rows), setup, budget_s))
    for name, cost in costs["ways"].items():
        found[name] = cost if "unavailable" in cost else {**found[name], **cost}
    return {"batch_size": rows, "seconds": time.monotonic() - start, "batches": costs["batches"], "ways": found}


def _score(way: Way, setup: Setup) -> Scores:
    """The loss in fp32 of the outputs."""
    return score(lambda x: way(x).float(), setup.dataset, setup.task)


def _unavailable(error: Exception) -> Row:
    return {"unavailable": f"{type(error).__name__}: {error}".splitlines()[0]}


def _batch(setup: Setup, rows: int) -> Tensor:
    """Training samples from the first on, again and again where there are fewer."""
    x = setup.dataset.x_train
    return x[:rows] if rows <= len(x) else x[torch.arange(rows, device=x.device) % len(x)]


def _costs(made: dict[str, Way], x: Tensor, setup: Setup, budget_s: float) -> dict[str, Any]:
    """What does not depend on the values of the weights."""
    found: dict[str, Row] = {}
    for name, way in made.items():
        try:
            peak = meter.peak_memory(setup.device, partial(way, x)).bytes  # which also warms it up
            found[name] = {"weight_bytes": way.weight_bytes, "peak_memory_bytes": peak + x.nbytes + way.weight_bytes}
        except Exception as error:  # out of memory, say
            found[name] = _unavailable(error)
    able = {name: way for name, way in made.items() if "unavailable" not in found[name]}
    times = time_batches(able, x, setup.clock, budget_s)
    for name, ms in times.items():
        p20, p50, p80 = np.percentile(ms, (20, 50, 80)).tolist()
        found[name] |= {"latency_ms": p50, "latency_ms_p20": p20, "latency_ms_p80": p80}
        found[name]["samples_per_s"] = len(x) / p50 * 1e3
    return {"ways": found, "batches": max(map(len, times.values()), default=0)}


def time_batches(made: dict[str, Way], x: Tensor, clock: Clock, budget_s: float) -> dict[str, list[float]]:
    """Milliseconds of each timed batch. The ways take turns, in an order that rotates, so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in made}
    end = time.monotonic() + budget_s
    for number in itertools.count():
        if not made or (number >= MIN_BATCHES and time.monotonic() >= end):
            return times
        for name in _rotated(list(made), number):
            way = made[name]
            with torch.inference_mode(), machine.tf32(way.tf32):
                clock.mark()
                way.forward(x)
                clock.mark()
            times[name] += clock.read()
    raise AssertionError("counts for ever")


def _rotated(names: Sequence[str], number: int) -> list[str]:
    first = number % len(names)
    return [*names[first:], *names[:first]]
