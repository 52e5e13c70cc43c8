"""mpcompare: the referee for mixed precision training. Start reading at :mod:`mpcompare.contract`."""

from importlib import metadata

from mpcompare.api.compare import compare
from mpcompare.watching import watch

__all__ = ["__version__", "compare", "watch"]

try:
    __version__ = metadata.version("mpcompare")
except metadata.PackageNotFoundError:  # a checkout that is on the path and not installed
    __version__ = "unknown"
