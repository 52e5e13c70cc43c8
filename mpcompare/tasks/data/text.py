"""English text for the next character: the help pages that ship with CPython, ``pydoc_data.topics``."""

import platform

import torch
from torch import Tensor

from mpcompare.errors import InputError, check_number, check_whole
from mpcompare.tasks.data.dataset import Dataset
from mpcompare.tasks.losses import MaskedCrossEntropy

# The 96 characters: newline is 0, printable ASCII 1 to 95. Any other character becomes a question mark.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))


def topics(seed: int, length: int = 64, held_out: float = 0.1, masked: float = 0.0) -> Dataset:
    """Returns windows of ``length`` characters and, for each character, the next one: int64 ids ``[N, length]`` both.

    The windows lie side by side, without overlap. The last ``held_out`` of the text is held out; the windows before it
    come in an order drawn from ``seed``. The text differs between versions of Python, and so does the fingerprint.

    With ``masked`` a window begins with a prompt that nobody is asked to predict: its labels are -100. Its length is
    drawn from 0 to twice this share of the window, and leaves a label at least. Raises InputError where this Python has
    no ``pydoc_data``, or the text is too short for such windows."""
    check_whole("data.length", length, at_least=1)
    check_number("data.held_out", held_out, above=0, below=1)
    check_number("data.masked", masked, at_least=0, below=0.5)
    ids = encode(_text())
    windows = (len(ids) - 1) // length
    tests = round(windows * held_out)
    if not 0 < tests < windows:
        raise InputError("data.length", length, f"the text has {len(ids)} characters, too few for both parts")
    x, y = (ids[first : first + windows * length].reshape(windows, length) for first in (0, 1))
    order = torch.randperm(windows - tests, generator=torch.Generator().manual_seed(seed))
    if masked:
        prompts = torch.rand(windows, 1, generator=torch.Generator().manual_seed(0)) * 2 * masked * length
        y = y.masked_fill(torch.arange(length) < prompts.round().clamp(max=length - 1), MaskedCrossEntropy.ignored)
    reason = f"{len(ids)} characters of the help pages of Python {platform.python_version()}"
    return Dataset("topics", reason, x[order], y[order], x[windows - tests :], y[windows - tests :])


def encode(text: str) -> Tensor:
    """Returns the places of the text's characters in ``ALPHABET``, int64 ``[len(text)]``."""
    place = {character: i for i, character in enumerate(ALPHABET)}
    other = place["?"]
    return torch.tensor([place.get(character, other) for character in text])


def _text() -> str:
    try:
        from pydoc_data.topics import topics as pages
    except ImportError as error:
        expected = f"this Python has no pydoc_data ({error}); take one that ships with its help pages"
        raise InputError("data", "text", expected) from error
    return "".join(pages[name] for name in sorted(pages))
