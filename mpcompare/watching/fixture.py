"""A pytest plugin: the fixture ``watched`` lets a test watch a training loop, and fail where it is wrong.

def test_training(watched):
    with watched(model, optimizer, expect={"precision": "bf16"}):
        train_one_epoch(model, optimizer)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpcompare.watching import watch


@pytest.fixture
def watched() -> Callable[..., AbstractContextManager[Any]]:
    """``mpcompare.watch`` whose block raises at its end where the training is wrong, or not as ``expect`` says."""

    @contextmanager
    def watching(
        model: Any, optimizer: Any, expect: Mapping[str, Any] | str | Path | None = None, **options: Any
    ) -> Iterator[Any]:
        with watch(model, optimizer, **options) as seen:
            yield seen
        seen.raise_if_wrong(expect)

    return watching
