"""Tries wrong inputs on the command line. Each must end with one line and exit code 2, and leave nothing half-written.

python scripts/wrong_inputs.py               # all of them, some minutes
python scripts/wrong_inputs.py --every 10    # a tenth, as CI does
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import wrong_user
from wrong_table import Wrong, every

from mpcompare.__main__ import main as mpcompare

# A command that works, in a second.
WORKS = ("backend=fp32", "task=module", "task.model._target_=wrong.Net", "data=function", "data._target_=wrong.good",
         "task.batch_size=16", "train.steps=2", "train.warmup_steps=1", "measure.budget_s=0.05",
         "measure.block_s=0.005", "inference.enabled=true", "inference.budget_s=0.05", "hydra.run.dir=run")  # fmt: skip
ERROR = "mpcompare: error: "


@contextlib.contextmanager
def folder_of_a_user() -> Iterator[Path]:
    """Makes a working directory with a user's module in it, ``wrong``."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(wrong_user.__file__, Path(folder) / "wrong.py")
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            sys.path.remove(folder)
            sys.modules.pop("wrong", None)


def faults_of(wrong: Wrong, folder: Path) -> list[str]:
    """Returns what is wrong with how mpcompare takes a wrong input; empty where all is well."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    sys.argv = ["mpcompare", *WORKS, *wrong.overrides]
    code: object = 0
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            mpcompare()
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            return [f"{type(error).__name__}: {error}"]
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("[")]
    faults = [] if code == 2 else [f"exit code {code}"]
    begins, _, holds = wrong.said.partition("*")
    if len(lines) != 1 or not lines[0].startswith(ERROR + begins) or holds not in lines[0]:
        faults.append(f"said {' / '.join(lines)[:300] or 'nothing'}, expected {wrong.said}")
    if "Traceback" in out.getvalue():
        faults.append("a traceback in its log")
    return faults + [f"left {name}" for name in _half_written(folder)]


def _half_written(folder: Path) -> list[str]:
    """Returns the files that no run which was refused leaves."""
    names = [path.name for path in folder.rglob("*") if path.name == "steps.csv" or path.name.startswith(".result")]
    for path in folder.rglob("result.json"):
        if json.loads(path.read_text())["status"] != "failed":
            names.append("result.json of a run that did not fail")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth (default: all)")
    step, began = parser.parse_args().every, time.monotonic()
    failed = tried = 0
    with folder_of_a_user() as folder:
        for wrong in islice(every(), 0, None, step):
            tried += 1
            if faults := faults_of(wrong, folder):
                failed += 1
                print(f"{' '.join(wrong.overrides)}: {'; '.join(faults)}", flush=True)
    print(f"{tried - failed} of {tried} wrong inputs are one line ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
