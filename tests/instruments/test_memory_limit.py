"""Memory that the machine does not have is refused, and not used until the kernel kills somebody."""

import subprocess
import sys

import pytest

from mpcompare.errors import out_of_memory, want_of_memory
from mpcompare.instruments import memory_limit, meter

GB = 10**9
linux = pytest.mark.skipif(meter.data_bytes() is None, reason="the system limits no data")

# A process of its own: what fails in a process that others share may be theirs.
ASKS = """
import torch
from mpcompare.errors import want_of_memory
from mpcompare.instruments import heap, memory_limit

torch.ones(1000, 1000) @ torch.ones(1000, 1000)
memory_limit._left_in_cgroups = lambda: [500_000_000]
with memory_limit.limited(), heap.kept():
    fits = torch.ones(100_000_000, dtype=torch.uint8)
    try:
        torch.ones(1_000_000_000, dtype=torch.uint8)
    except RuntimeError as error:
        print(want_of_memory(error))
    print(0 <= memory_limit.available_bytes() < 500_000_000)
print(len(torch.ones(1_000_000_000, dtype=torch.uint8)))
"""


@pytest.mark.slow
@linux
def test_more_memory_than_is_left_is_an_error_and_only_in_the_block():
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    refused, left, afterwards = done.stdout.splitlines()
    assert refused.startswith("out of memory, try a smaller task.batch_size or task.model (RuntimeError: ")
    assert "1000000000 bytes" in refused
    assert (left, afterwards) == ("True", "1000000000")


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            {"memory.max": f"{8 * GB}", "memory.current": f"{6 * GB}", "memory.stat": f"anon 5\ninactive_file {GB}\n"},
            3 * GB,
        ),
        ({"memory.max": "max", "memory.current": f"{6 * GB}", "memory.stat": ""}, None),
        ({}, None),
    ],
)
def test_a_container_has_what_its_control_group_leaves(files, left, tmp_path, monkeypatch):
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/elsewhere\n0::/kubepods/pod\n")
    group = tmp_path / "fs" / "kubepods"
    (group / "pod").mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(text)
    monkeypatch.setattr(memory_limit, "OWN_CGROUP", own)
    monkeypatch.setattr(memory_limit, "CGROUPS", tmp_path / "fs")
    assert list(memory_limit._left_in_cgroups()) == ([] if left is None else [left])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("unable to mmap 8 bytes from file <f>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_want_of_memory_is_known_by_its_error(error):
    assert out_of_memory(error)


def test_other_errors_want_no_memory():
    assert want_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert want_of_memory(ValueError("Cannot allocate memory")) is None
