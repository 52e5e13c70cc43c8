"""mpcompare: the referee for mixed precision training. Start reading at :mod:`mpcompare.contract`."""

from mpcompare.api.compare import compare

__all__ = ["compare"]
