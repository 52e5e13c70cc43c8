"""Breaks runs in random ways, and looks after each fault whether anything was lost:

python scripts/faults.py                      # 1,000 faults, about an hour
python scripts/faults.py --faults 25          # as many as a slow test takes
python scripts/faults.py --only 17 --seed 3   # one of them again

Runs are killed at random moments, their disks are full from a random moment on, their streams are closed, their records
and checkpoints are damaged (``faults_kinds.py``). After each fault no finished record may have changed, all that was
written must be whole, and no process may be left. The resumed run must have the numbers of an unbroken one, bit for
bit. ``sweep_kills.py`` does this with all processes of a sweep. ``wrong_inputs.py`` tries what users get wrong.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from faults_command import digest
from faults_kinds import KINDS, Ground


def what_it_cost(number: int, seed: int, ground: Ground) -> tuple[str, str]:
    """Lets one fault happen. Returns its kind, and what it has cost; empty if nothing."""
    draw = random.Random(f"{seed} {number}")
    (fault,) = draw.choices(list(KINDS), list(KINDS.values()))
    with tempfile.TemporaryDirectory(dir=ground.folder) as folder:
        try:
            fault(ground, Path(folder), draw)
            assert digest(ground.folder / "runs") == ground.before, "a finished record has changed"
        except Exception as error:  # any error is caused by the fault
            return fault.__name__, f"{type(error).__name__}: {error}"
    return fault.__name__, ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, metavar="N", help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only this one of them")
    asked = parser.parse_args(arguments)
    tried, failed, began = Counter[str](), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        ground = Ground(Path(name))
        for number in range(asked.faults) if asked.only is None else [asked.only]:
            kind, cost = what_it_cost(number, asked.seed, ground)
            tried[kind] += 1
            failed[kind] += bool(cost)
            if cost:
                print(f"{number}: {kind}: {cost}", flush=True)
    for kind, count in sorted(tried.items()):
        print(f"{count - failed[kind]} of {count} faults of the kind {kind} cost nothing")
    print(f"{tried.total() - failed.total()} of {tried.total()} faults cost nothing ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if failed.total() else 0)


if __name__ == "__main__":
    main()
