"""The states of all random generators that a step could draw from, as tensors: torch's, Python's and numpy's."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def states(device: torch.device) -> dict[str, Tensor]:
    """The state of each by name, uint8 ``[bytes]``: ``cpu``, ``python``, ``numpy``, and on a GPU ``cuda``, that of
    ``device``."""
    found = {
        "cpu": torch.get_rng_state(),
        "python": _as_bytes(random.getstate()),
        "numpy": _as_bytes(np.random.get_state(legacy=False)),
    }
    return {**found, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else found


def restore(found: Mapping[str, Tensor], device: torch.device) -> None:
    """The inverse of :func:`states`. A generator that is not named, as a GPU's after training on a CPU, stays as it
    is."""
    if "cpu" in found:
        torch.set_rng_state(found["cpu"])
    if "python" in found:
        version, words, normal = _from_bytes(found["python"])
        random.setstate((version, tuple(words), normal))
    if "numpy" in found:
        np.random.set_state(_from_bytes(found["numpy"]))
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)


def _as_bytes(state: object) -> Tensor:
    text = json.dumps(state, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _from_bytes(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
