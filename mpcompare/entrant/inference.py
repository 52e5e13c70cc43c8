"""The pass that calls the trained network in each precision: forward only, from its master parameters.

way              computation
autocast BITS    ``torch.autocast`` around the fp32 module, which casts its weights in every call
BITS weights     the module cast once, as tasks/cast.py does it: norms and embeddings stay in fp32
fp32             the module as it is, in IEEE fp32
tf32             the same with TF32 allowed, only of a run in this precision

BITS are the format of the run. For a run in fp32 or TF32 they are what ``precision=auto`` would choose on this device.
The scores of a way depend on the training, so each run has its own. Time and memory do not, so the entrants of a race
share them.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from mpcompare.dtypes import torch_dtype
from mpcompare.entrant.evaluation import Scores, score
from mpcompare.entrant.setup import Setup
from mpcompare.entrant.state import Entrant, Fields
from mpcompare.errors import first_line
from mpcompare.instruments import fp32_products, meter
from mpcompare.instruments.clock import Clock
from mpcompare.precision import PRECISIONS, preferred
from mpcompare.tasks.batch import Batch, nbytes
from mpcompare.tasks.cast import cast_module
from mpcompare.tasks.copies import copy_of
from mpcompare.tasks.task import with_values

MIN_BATCHES = 3  # timed batches of each way, even if the first one takes all the time
Forward = Callable[[Batch], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to call the network."""

    forward: Forward  # maps inputs, as the data set holds them, to outputs
    network: nn.Module  # the module that holds the weights
    tf32: bool = False  # whether its products may round to TF32

    def __call__(self, x: Batch) -> Any:
        with torch.inference_mode(), fp32_products.tf32(self.tf32):
            return self.forward(x)

    @property
    def weight_bytes(self) -> int:
        """The bytes of parameters and buffers. Tied ones count once."""
        tensors = {id(t): t.nbytes for t in itertools.chain(self.network.parameters(), self.network.buffers())}
        return sum(tensors.values())


def autocast(network: nn.Module, dtype: torch.dtype) -> Way:
    """Returns the network under ``torch.autocast``, the recipe of ``torch.amp`` for inference."""
    device_type = next(network.parameters()).device.type

    def forward(x: Batch) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return network(x)

    return Way(forward, network)


def cast_weights(network: nn.Module, dtype: torch.dtype) -> Way:
    """Returns a copy of the network in 16 bits; its inputs are cast in every call."""
    network = copy_of(network)
    cast_module(network, dtype)
    return Way(lambda x: network(x.to(dtype) if x.is_floating_point() else x), network)


def ways(precision: str, device: torch.device) -> dict[str, Callable[[nn.Module], Way]]:
    """Returns by name the functions that make each way from a network in evaluation mode, which they do not change.

    Args:
        precision: the precision of the run, resolved.
    """
    trained = PRECISIONS[precision]
    bits = (trained if trained.is_16_bit else preferred(device.type)).storage
    makers: dict[str, Callable[[nn.Module], Way]] = {
        f"autocast {bits.name}": partial(autocast, dtype=torch_dtype(bits)),
        f"{bits.name} weights": partial(cast_weights, dtype=torch_dtype(bits)),
        "fp32": lambda network: Way(network, network),
    }
    if trained.uses_tf32:
        makers["tf32"] = lambda network: Way(network, network, tf32=True)
    return makers


def take(entrant: Entrant) -> Fields:
    """Measures all ways in turns, if the plan asks for that. Needs ``setup`` and ``trained``. Leaves nothing.

    Returns:
        ``batch_size``; ``seconds`` that it took; ``batches`` that were timed of each way; and by name the ``ways``:
        ``test_loss`` and ``test_accuracy`` on all held-out samples, ``latency_ms`` of a batch (the median, and
        ``latency_ms_p20`` and ``latency_ms_p80``), ``samples_per_s``, ``weight_bytes`` and ``peak_memory_bytes``:
        weights, batch, and the most that a call had allocated besides. A way that cannot be had here has only
        ``unavailable``, the reason in a line.
    """
    plan, setup = entrant.plan.inference, entrant.setup
    if not plan.enabled:
        return {}
    state, start = entrant.trained.state(), time.monotonic()
    network = with_values(setup.model, state["params"], state["buffers"]).eval()
    batch_size = plan.batch_size or setup.task.micro_batch_size
    able: dict[str, Way] = {}
    rows: dict[str, Row] = {}
    for name, make in ways(setup.record.precision, setup.device).items():
        try:
            way = make(network)
            # The fp32 way has the scores of the trained backend.
            rows[name] = dict(entrant.trained.scores if name == "fp32" else _score(way, setup))
            able[name] = way
        except Exception as error:  # a user's network may raise anything where it meets another dtype
            rows[name] = {"unavailable": first_line(error)}
    key = "-".join(["inference", str(batch_size), *able]).replace(" ", "_")
    costs = entrant.shared.once(key, lambda: _costs(able, batch_size, setup, plan.budget_s))
    for name, cost in costs["ways"].items():
        rows[name] = cost if "unavailable" in cost else {**rows[name], **cost}
    seconds = time.monotonic() - start
    found = {"batch_size": batch_size, "seconds": seconds, "batches": costs["batches"], "ways": rows}
    return {"inference": found}


def _score(way: Way, setup: Setup) -> Scores:
    return score(lambda x: way(x).float(), setup.dataset, setup.task)


def _costs(able: dict[str, Way], batch_size: int, setup: Setup, budget_s: float) -> dict[str, Any]:
    """Returns time and memory of each way, which do not depend on the values of the weights. The batch has the training
    samples from the first on, again and again where there are fewer."""
    x, rows = setup.dataset.x_train, dict[str, Row]()
    x = x[torch.arange(batch_size, device=x.device) % len(x)]
    for name, way in able.items():
        try:
            peak = meter.peak_memory(setup.device, partial(way, x)).bytes  # this also warms the way up
            rows[name] = {"weight_bytes": way.weight_bytes, "peak_memory_bytes": peak + nbytes(x) + way.weight_bytes}
        except Exception as error:  # out of memory, say
            rows[name] = {"unavailable": first_line(error)}
    left = {name: way for name, way in able.items() if "unavailable" not in rows[name]}
    times = time_batches(left, x, setup.clock, budget_s)
    for name, ms in times.items():
        p20, p50, p80 = np.percentile(ms, (20, 50, 80)).tolist()
        rows[name] |= {"latency_ms": p50, "latency_ms_p20": p20, "latency_ms_p80": p80}
        rows[name]["samples_per_s"] = len(x) / p50 * 1e3
    return {"ways": rows, "batches": max(map(len, times.values()), default=0)}


def time_batches(able: dict[str, Way], x: Batch, clock: Clock, budget_s: float) -> dict[str, list[float]]:
    """Returns the milliseconds of each timed batch.

    The ways take turns, in an order that rotates, so that drift hits all ways alike.
    """
    times: dict[str, list[float]] = {name: [] for name in able}
    end = time.monotonic() + budget_s
    order, number = deque(able), 0
    while able and (number < MIN_BATCHES or time.monotonic() < end):
        for name in order:
            way = able[name]
            with torch.inference_mode(), fp32_products.tf32(way.tf32):
                clock.mark()
                way.forward(x)
                clock.mark()
            times[name] += clock.read()
        order.rotate(-1)
        number += 1
    return times
