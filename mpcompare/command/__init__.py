"""The command line. Nothing outside of this room knows Hydra."""

import sys

if sys.platform == "win32":  # it has no fcntl, for one
    sys.exit("mpcompare: error: expected Linux or macOS; on Windows, take its subsystem for Linux (WSL)")

from mpcompare.command import folders as folders  # the configuration names its resolver
