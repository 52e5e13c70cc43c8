"""A process that asks for more memory than the machine has left gets an error for it.

Linux promises more memory than there is, and kills a process that uses what it was promised. A limit of the process's
own data (``RLIMIT_DATA``) lets the allocation fail instead: torch raises an error, and whoever asked can go on with
something smaller.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mpcompare.instruments import meter

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


@contextmanager
def limited() -> Iterator[None]:
    """Limits what this process can ask for in the block to what is available as it begins, swap included.

    Nothing is limited where the system does not say how much data a process has (elsewhere than on Linux).
    """
    data = meter.data_bytes()
    if data is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + available_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available_bytes() -> int:
    """Returns the bytes that this process can still have: the least of what is left to the machine and its swap, to its
    control groups (version 2, as containers have them), and below its own limit."""
    bounds = [psutil.virtual_memory().available + psutil.swap_memory().free, *_left_in_cgroups()]
    data = meter.data_bytes()
    if data is not None and (limit := resource.getrlimit(resource.RLIMIT_DATA)[0]) >= 0:
        bounds.append(limit - data)
    return max(min(bounds), 0)


def _left_in_cgroups() -> Iterator[int]:
    """Yields what is left in each control group of this process that has a limit."""
    try:
        groups = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), None)
    if own is None:
        return
    for group in [CGROUPS / own, *(CGROUPS / own).parents]:
        try:
            limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
            files = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):  # it has no limit ("max"), or is the root
            continue
        yield limit - used + (int(files[1]) if files else 0)  # pages of files can be dropped
