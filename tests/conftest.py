"""Fixtures of all tests, and the surroundings that they run in."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads OpenMP: threads that wait let others compute

import gc
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch
from markupsafe import Markup
from support.graphs import recorded_graphs  # noqa: F401 - a fixture
from support.marks import CUDA

pytest.register_assert_rewrite("support.operators", "support.operator_checks")

hypothesis.settings.register_profile("mpcompare", deadline=None, derandomize=True, max_examples=30, database=None)
hypothesis.settings.register_profile("few", deadline=None, derandomize=True, max_examples=3, database=None)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000, database=None)  # scripts/sanitize.sh
hypothesis.settings.load_profile("mpcompare")

# Small tests, and the processes that they start, are quickest on one thread: two wait for each other in every small
# step, and for long if other programs compute too.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
# A shell that starts the tests in the background lets them and their children ignore Ctrl-C. But tests send Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", metavar="K/N", help="of all tests the part K, from 0, of N equal parts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of ``--part``. A name tells the part, so that all parts together are all tests."""
    part, parts = map(int, config.getoption("--part").split("/"))
    left = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]
    if len(left) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(left)])
        items[:] = left


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Gives each test the same random numbers, whatever ran before: torch draws a seed of its own in each process."""
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Hides imported objects from the garbage collector. Else every measurement of memory would walk half a million
    objects, because it collects garbage first. So would every watch, which looks through all objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count what is left at the end would write of leaks


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Lets torch compute on two threads, for tests of operators that split their work between them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Returns each device; on a CPU, CUDA graphs are recorded (tests/support/graphs.py)."""
    if request.param == "cpu":
        request.getfixturevalue("recorded_graphs")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """Returns the folder that holds MNIST."""
    root = os.environ.get("MPCOMPARE_DATA")
    if not root or not (Path(root) / "MNIST").is_dir():
        pytest.skip("MPCOMPARE_DATA does not name a folder with MNIST")
    return Path(root)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has an empty drawing for each figure of the page of a report, which takes most of the time of a report. Whether a
    figure has something to show, and its text, are as they are."""

    def inline(figure: object, name: str, alt: str) -> Markup:
        return Markup('<svg role="img" aria-label="{}"></svg>').format(alt)

    monkeypatch.setattr("mpcompare.report.outputs.page.figures.inline", inline)


@dataclass
class Ended:
    """A command that ended: its exit code, and what it wrote to each stream."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Ended]:
    """Returns a function that runs ``python -m mpcompare ARGS``, or another module's main, in this process, in an
    empty folder."""

    def run(*args: str, main: Callable[[], None] | None = None) -> Ended:
        from mpcompare.__main__ import main as mpcompare_main

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["mpcompare", *args])
        capfd.readouterr()
        code = 0
        try:
            (main or mpcompare_main)()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run
