"""Film reviews that praise or blame (Maas et al., 2011): the folder ``aclImdb`` as Stanford publishes it."""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from mpcompare.errors import InputError, check_whole
from mpcompare.tasks.data.dataset import Dataset
from mpcompare.tasks.data.source import find_root

PADDING, UNKNOWN = 0, 1  # the ids that are no word
_ADDRESS = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_WORD = re.compile(r"\w+(?:'\w+)*")
_CLASSES = ("neg", "pos")  # 0 and 1


def imdb(
    seed: int, root: str | None = None, length: int = 256, vocabulary: int = 10000, samples: int | None = None
) -> Dataset:
    """Returns reviews as ids of their words, int64 ``[N, length]``, and 0 (blame) or 1 (praise), int64 ``[N]``.

    Words are in lower case. The most frequent words of the training part have ids (equally frequent ones in the order
    of the alphabet); the others are ``UNKNOWN``. Only a review's first ``length`` words are taken, and a shorter review
    is followed by ``PADDING``. Raises InputError where a folder is missing or empty, or a review cannot be read.

    Args:
        seed: draws the order of the reviews.
        root: the folder that holds ``aclImdb``, or ``aclImdb`` itself; None: ``paths.data_root``.
        vocabulary: number of ids, the two that are no word included.
        samples: at most so many reviews of each part, drawn with ``seed``; None: all of them.
    """
    check_whole("data.length", length, at_least=1)
    check_whole("data.vocabulary", vocabulary, at_least=3)
    if samples is not None:
        check_whole("data.samples", samples, at_least=1)
    root, folder = find_root(root)
    folder = folder.parent if folder.name == "aclImdb" else folder
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for part in ("train", "test"):
        paths = [(path, y) for y, name in enumerate(_CLASSES) for path in _reviews(root, folder, f"{part}/{name}")]
        order = torch.randperm(len(paths), generator=generator)[:samples].tolist()
        parts.append(([_words(root, paths[i][0]) for i in order], torch.tensor([paths[i][1] for i in order])))
    (train, y_train), (test, y_test) = parts
    ids = _vocabulary(train, vocabulary)
    return Dataset("imdb", f"found in {root}", _encode(train, ids, length), y_train, _encode(test, ids, length), y_test)


def _reviews(root: str, folder: Path, part: str) -> list[Path]:
    """Returns the files of one class of one part, sorted by name."""
    inside = folder / "aclImdb" / part
    if not inside.is_dir():
        expected = (
            f"holds no aclImdb/{part}; get {_ADDRESS} and unpack it there, or name the folder that holds aclImdb "
        )
        raise InputError("data.root", root, expected + "with data.root=FOLDER")
    if not (paths := sorted(inside.glob("*.txt"))):
        raise InputError("data.root", root, f"aclImdb/{part} holds no review (*.txt)")
    return paths


def _words(root: str, path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("data.root", root, f"cannot read {path}: {error}") from error
    return _WORD.findall(text.lower().replace("<br />", " "))


def _vocabulary(reviews: Iterable[list[str]], size: int) -> dict[str, int]:
    counts = Counter(chain.from_iterable(reviews))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: i for i, word in enumerate(islice(frequent, size - 2), start=UNKNOWN + 1)}


def _encode(reviews: list[list[str]], ids: dict[str, int], length: int) -> Tensor:
    x = torch.full((len(reviews), length), PADDING)
    for row, words in zip(x, reviews, strict=True):
        known = [ids.get(word, UNKNOWN) for word in words[:length]]
        row[: len(known)] = torch.tensor(known, dtype=torch.int64)
    return x
