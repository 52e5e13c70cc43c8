"""The requirements on a backend that goes on: from a state, after a step has returned, and with another backend."""

import copy
import io
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import Batches
from mpcompare.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mpcompare.tasks.task import Params
from mpcompare.testing.candidate import Candidate, Checked
from mpcompare.verdict.examine import numerics

SOON_S = 0.05  # seconds in which a step that goes on in another thread shows


def goes_on_from_a_state(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """A new backend that loads a state continues bit for bit."""
    stream = candidate.batches(8)
    scalings = (DynamicLossScale(256.0, growth_interval=3), StaticLossScale(256.0), NoLossScale())
    scaling = candidate.accepted(*scalings)[0]
    first = candidate.make(candidate.model(), scaling)
    for batch in stream[:2]:
        candidate.step(first, batch)
    lent = copy.deepcopy(first.state_dict())
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    ways = {
        "copy.deepcopy": copy.deepcopy(first.state_dict()),
        "torch.save and torch.load": torch.load(file, weights_only=False),
    }
    expected = list(_go_on(candidate, first, stream[2:]))
    for way, saved in ways.items():
        loaded = candidate.make(candidate.model(seed=1), scaling)  # other weights: what the state lacks shows
        loaded.load_state_dict(saved)
        if different := _first_difference(expected, list(_go_on(candidate, loaded, stream[2:])), candidate.device):
            yield f"a backend that loads a state (by {way}) continues with {different}"
            return
    loaded = candidate.make(candidate.model(seed=1), scaling)
    loaded.load_state_dict(lent)
    for named in (lent["params"], lent["buffers"], *lent["optimizer"].values()):
        for tensor in named.values():
            tensor.zero_()
    if different := _first_difference(expected, list(_go_on(candidate, loaded, stream[2:])), candidate.device):
        yield f"load_state_dict() keeps a tensor of the state: expected copies (overwritten, it makes {different})"


def finished(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """A step is finished when it returns."""
    backend = candidate.new()
    for batch in candidate.batches(3):
        candidate.step(backend, batch)
        at_once = copy_of_all(backend.master_params())
        time.sleep(SOON_S)
        if any(not numerics.same_bits(at_once[name], p) for name, p in backend.master_params().items()):
            yield "weights change after the step has returned: expected it to be finished, or the clock misses a part"
            return


def two_at_once(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """Two backends of one process do not disturb each other."""
    stream = candidate.batches(8)
    alone = list(_go_on(candidate, candidate.new(), stream[:4]))
    one, other = candidate.new(), candidate.new(seed=1)
    together: list[dict[str, Tensor]] = []
    for batch, of_the_other in zip(stream[:4], stream[4:], strict=True):
        together += _go_on(candidate, one, [batch])
        candidate.step(other, of_the_other)
    if different := _first_difference(alone, together, candidate.device):
        yield f"with another backend in the same process it computes {different}"


def copy_of_all(tensors: Mapping[str, Tensor]) -> Params:
    """Returns copies of tensors, by their names."""
    return {name: t.detach().clone() for name, t in tensors.items()}


def _go_on(candidate: Candidate, backend: Any, stream: list[Batches]) -> Iterator[dict[str, Tensor]]:
    """Yields what each step leaves: loss, loss scale, parameters and buffers."""
    for batch in stream:
        loss = candidate.step(backend, batch).detach().clone()
        tensors = {**copy_of_all(backend.master_params()), **copy_of_all(backend.buffers())}
        yield {"another loss": loss, "another loss scale": torch.tensor(float(backend.loss_scale())), **{
            f"another {name}": tensor for name, tensor in tensors.items()
        }}  # fmt: skip


def _first_difference(expected: list[dict[str, Tensor]], actual: list[dict[str, Tensor]], device: torch.device) -> str:
    """Returns the first difference, as in ``another loss in step 2``; empty where there is none. On CUDA sums may be
    taken in another order, and tensors are equal within 1e-6 of the norm."""
    for number, (a, b) in enumerate(zip(expected, actual, strict=True), start=1):
        for name, tensor in a.items():
            one, other = {"": tensor}, {"": b[name]}
            near = device.type == "cuda" and numerics.distance(one, other) <= 1e-6 * numerics.finite_norm(one)
            if not near and not numerics.same_bits(tensor, b[name]):
                return f"{name} in step {number}"
    return ""
