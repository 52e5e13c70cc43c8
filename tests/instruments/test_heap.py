"""Freed memory is kept while nothing is timed, and steps that are timed later do not notice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcompare.instruments import heap, meter

MB = 1 << 20
PAGES = 64 * MB // 4096
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = [
    pytest.mark.skipif(heap._glibc() is None, reason="needs glibc 2.33"),
    pytest.mark.skipif(HUGE.exists() and "[always]" in HUGE.read_text(), reason="a page of a tensor is huge here"),
]


def in_a_fresh_process(script: str, *arguments: str, **environment: str) -> Any:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(heap.SET_BY_USER)}
    command = [sys.executable, Path(__file__).parents[1] / "support" / script, *arguments]
    done = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return in_a_fresh_process("freed_memory.py")


@pytest.mark.slow
def test_a_tensor_lies_where_one_was_freed(found):
    assert min(found["plain"]) >= PAGES
    assert found["kept"][-1] < PAGES / 100


@pytest.mark.slow
def test_later_tensors_are_mapped_anew(found):
    assert min(found["after"]) >= PAGES
    assert min(found["after an exception"]) >= PAGES


def test_so_they_are_where_small_blocks_survive_above_a_hole(found):
    assert found["free in the heap"] < 16 * MB
    assert min(found["after survivors"]) >= PAGES


def test_memory_goes_back(found):
    assert found["resident within"] > 200 * MB
    assert found["resident after"] < 50 * MB


def test_holes_do_not_add_up(found):
    """Blocks that fill a hole are freed before the next ones are made."""
    assert max(found["heap"]) < found["heap"][0] + 4 * 256 * MB


@pytest.mark.slow
def test_who_set_malloc_up_gets_it_so():
    found = in_a_fresh_process("freed_memory.py", MALLOC_ARENA_MAX="2")
    assert min(found["kept"]) >= PAGES


@pytest.mark.slow
def test_a_timed_step_has_the_page_faults_of_a_program_of_its_own(tmp_path):
    """In bf16 z, relu(z) and their gradients are 36 MB each, which malloc maps anew in every step. Examining leaves
    holes for them, where a step of ``amp`` has no page faults and is faster by up to a sixth. Two features keep the
    products small: a CPU may have no fast ones in bf16."""
    rows, width = 4096, 4352
    assert 2 * rows * width > heap.LARGE
    task = [f"task.batch_size={rows}", f"task.model.hidden=[{width}]"]
    task += [f"task.model.{end}_features=2" for end in ("in", "out")]
    settings = ["train.steps=2", "verdict.noise=1", "measure.budget_s=1", "inference.enabled=false", "data=synthetic"]
    run = ["backend=amp", "precision=bf16", "device=cpu", f"hydra.run.dir={tmp_path}", *settings, *task]
    assert min(in_a_fresh_process("timed_faults.py", *run)) >= 4 * (2 * rows * width) // 4096


@pytest.mark.skipif(sys.platform != "linux", reason="pages of a file are known on Linux only")
def test_a_tensor_that_is_mapped_is_forgotten_and_read_again_and_any_other_stays(tmp_path):
    torch.save({"x": torch.arange(4_000_000.0)}, tmp_path / "x.pt")
    mapped, own = torch.load(tmp_path / "x.pt", mmap=True)["x"], torch.arange(4_000_000.0)
    total = float(mapped.sum())
    before = meter.rss_bytes()
    heap.forget(mapped)
    heap.forget(own)
    assert before - meter.rss_bytes() == pytest.approx(mapped.nbytes, rel=0.1)
    assert float(mapped.sum()) == total
    assert torch.equal(own, mapped)
