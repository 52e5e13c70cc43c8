"""The generators of random numbers that a network may ask while it is called: torch's, Python's and numpy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class GeneratorStates(NamedTuple):
    """The states of all three."""

    torch: Tensor
    python: Any
    numpy: Any


def states() -> GeneratorStates:
    """Returns the states as they are."""
    return GeneratorStates(torch.get_rng_state(), random.getstate(), np.random.get_state())


def put_back(states: GeneratorStates) -> None:
    """Sets the generators to states that they had."""
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    np.random.set_state(states.numpy)


@contextmanager
def kept() -> Iterator[None]:
    """Puts the generators back when it ends, as they were when it was entered."""
    before = states()
    try:
        yield
    finally:
        put_back(before)
