"""mpcompare: the referee for mixed precision training. Start reading at :mod:`mpcompare.contract`."""

from mpcompare.api.compare import compare
from mpcompare.foreign import version
from mpcompare.watching import watch

__all__ = ["__version__", "compare", "watch"]

__version__ = version("mpcompare") or "unknown"  # unknown: a checkout that is on the path and not installed
