"""The oracle's gradients, twice as large as the network: one of them at a time is in memory."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from mpcompare.instruments import heap


class Mapped(Mapping[str, Tensor]):
    """Large tensors that are mapped from a file: the one that was asked for last is in memory, and no other."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._last: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        self._forget()
        self._last = self._tensors[name]
        return self._last

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        self._forget()

    def __len__(self) -> int:
        return len(self._tensors)

    def _forget(self) -> None:
        if self._last is not None:
            heap.forget(self._last)  # its pages are read again if somebody still looks at it
            self._last = None
