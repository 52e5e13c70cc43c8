"""Where things are: the project's own files, and the user's cache."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# In a checkout conf/ and csrc/ stand beside the package; in an installed wheel they are inside it.
_ROOT = _PACKAGE.parent if (_PACKAGE.parent / "conf" / "config.yaml").is_file() else _PACKAGE
CONF = _ROOT / "conf"
CSRC = _ROOT / "csrc"


def data_root() -> str:
    """Where MNIST is looked for and downloaded to: ``$MPCOMPARE_DATA``, else the cache folder."""
    return os.environ.get("MPCOMPARE_DATA") or str(cache_dir()).replace(str(Path.home()), "~", 1)


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/mpcompare``, by default ``~/.cache/mpcompare``: data sets and built operators."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpcompare"
