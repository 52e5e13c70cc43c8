"""The paths of the project's own files and of the user's cache."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# In a checkout conf/, csrc/ and docs/ stand next to the package; in an installed wheel they are inside it.
_ROOT = _PACKAGE.parent if (_PACKAGE.parent / "conf" / "config.yaml").is_file() else _PACKAGE
CONF = _ROOT / "conf"
CSRC = _ROOT / "csrc"
DIFFERS = _ROOT / "docs" / "differs.md"  # what each cause means


def data_root() -> str:
    """Returns the folder to which data sets are downloaded: ``$MPCOMPARE_DATA``, else the cache folder."""
    return os.environ.get("MPCOMPARE_DATA") or str(cache_dir()).replace(str(Path.home()), "~", 1)


def cache_dir() -> Path:
    """Returns the folder of data sets and built operators: ``$XDG_CACHE_HOME/mpcompare``, by default
    ``~/.cache/mpcompare``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpcompare"
