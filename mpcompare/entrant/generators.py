"""The states of all random generators that a step could draw from, as tensors: torch's, Python's and numpy's."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpcompare.errors import InputError
from mpcompare.foreign import parsed


def states(device: torch.device) -> dict[str, Tensor]:
    """Returns the state of each generator by name, uint8 ``[bytes]``.

    The names are ``cpu``, ``python``, ``numpy``, and on a GPU ``cuda``, the generator of ``device``.
    """
    named = {
        "cpu": torch.get_rng_state(),
        "python": _as_bytes(random.getstate()),
        "numpy": _as_bytes(np.random.get_state(legacy=False)),
    }
    return {**named, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else named


def restore(named: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets each generator to its state from :func:`states`.

    A generator without a state, such as a GPU's after training on a CPU, stays as it is.

    Raises:
        InputError: a state is none of such a generator.
    """
    try:
        if "cpu" in named:
            torch.set_rng_state(named["cpu"])
        if "python" in named:
            version, words, normal = _from_bytes(named["python"])
            random.setstate((version, tuple(words), normal))
        if "numpy" in named:
            np.random.set_state(_from_bytes(named["numpy"]))
        if "cuda" in named and device.type == "cuda":
            torch.cuda.set_rng_state(named["cuda"], device)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise InputError("resume", "generators", f"expected states of torch, Python and numpy ({error})") from error


def _as_bytes(state: object) -> Tensor:
    text = json.dumps(state, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _from_bytes(state: Tensor) -> Any:
    return parsed(bytes(state.tolist()))
