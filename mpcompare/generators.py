"""The generators of random numbers that a step, or a network, may draw from: torch's, Python's and numpy's."""

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpcompare.errors import InputError
from mpcompare.foreign import parsed

CPU = torch.device("cpu")
GeneratorStates = Mapping[str, Any]  # by name: ``cpu``, ``python``, ``numpy``, and ``cuda`` of a device that is a GPU


def seed(number: int) -> None:
    """Sets torch's generators on all devices, as ``torch.manual_seed`` does. ``torch.manual_seed`` notes its caller for
    each kind of device that is not there, and so takes a hundred times as long as setting the generator of the CPU."""
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@contextmanager
def torchs_kept() -> Iterator[None]:
    """Puts torch's generators back when it ends, on all devices, as they were before any :func:`seed`. Generators of
    GPUs that this process does not use yet will begin from the seed of the CPU's, as ``torch.manual_seed`` wants it."""
    used = torch.cuda.is_initialized()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if used else []):
            yield
    finally:
        if torch.accelerator.is_available() and not used:
            torch.cuda.manual_seed_all(torch.initial_seed())


def states(device: torch.device = CPU) -> GeneratorStates:
    """Returns the states as they are."""
    named = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    return {**named, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else named


def put_back(states: GeneratorStates, device: torch.device = CPU) -> None:
    """Sets the generators to states that they had. A generator without a state, such as a GPU's after training on a
    CPU, stays as it is."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        DeviceGenerator(device).set(states["cuda"])


class DeviceGenerator:
    """Torch's generator of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def get(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def set(self, state: Tensor) -> None:
        """Sets the state. A GPU's generator that has the state already is left alone: each time that it is set, cuDNN
        draws a new seed for the dropout of recurrent layers."""
        if self.device.type == "cuda":
            if not np.array_equal(self.get().numpy(), state.numpy()):
                torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def fingerprint(state: Tensor) -> int:
    """Returns a number that tells one state from another."""
    return zlib.crc32(state.numpy().tobytes())


@contextmanager
def kept(device: torch.device = CPU) -> Iterator[None]:
    """Puts the generators back when it ends, as they were when it was entered."""
    before = states(device)
    try:
        yield
    finally:
        put_back(before, device)


def saved(device: torch.device) -> dict[str, Tensor]:
    """Returns the states as a file can hold them, uint8 ``[bytes]``."""
    return {name: state if isinstance(state, Tensor) else _as_bytes(state) for name, state in states(device).items()}


def restore(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the generators to states from :func:`saved`. Raises InputError where a state fits no such generator."""
    try:
        states = {n: t if n in ("cpu", "cuda") else parsed(bytes(t.tolist())) for n, t in tensors.items()}
        if "python" in states:
            version, words, normal = states["python"]
            states["python"] = version, tuple(words), normal
        put_back(states, device)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise InputError("resume", "generators", f"expected states of torch, Python and numpy ({error})") from error


def _as_bytes(state: object) -> Tensor:
    text = json.dumps(state, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
