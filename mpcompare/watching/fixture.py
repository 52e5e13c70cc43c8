"""A pytest plugin: the fixture ``watched`` lets a test watch a training loop, and fail where it is wrong.

def test_training(watched):
    with watched(model, optimizer, expect={"precision": "bf16"}):
        train_one_epoch(model, optimizer)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mpcompare.watching import watch


@dataclass
class WatchedBlock:
    """The block of a test. At its end it raises where the training is wrong."""

    seen: Any
    expect: Mapping[str, Any] | str | Path | None

    def __enter__(self) -> Any:
        return self.seen.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        __tracebackhide__ = True
        self.seen.__exit__(kind, error, trace)
        if error is None:
            self.seen.raise_if_wrong(self.expect)


@pytest.fixture
def watched() -> Iterator[Callable[..., AbstractContextManager[Any]]]:
    """``mpcompare.watch`` whose block raises at its end where the training is wrong, or not as ``expect`` says."""
    blocks: list[WatchedBlock] = []

    def watching(
        model: Any, optimizer: Any, expect: Mapping[str, Any] | str | Path | None = None, **options: Any
    ) -> WatchedBlock:
        blocks.append(WatchedBlock(watch(model, optimizer, **options), expect))
        return blocks[-1]

    yield watching
    if not all(block.seen.entered for block in blocks):
        pytest.fail("watched(model, optimizer) looks on within its block alone: put `with` before it", pytrace=False)
