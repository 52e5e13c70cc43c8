import time

import pytest
import torch
from support.networks import DroppingGpt

from mpcompare.instruments import meter

CPU = torch.device("cpu")
MEGABYTE = 1 << 20


def bytes_on(device, megabytes):
    return torch.empty(megabytes * MEGABYTE, dtype=torch.uint8, device=device)


def test_peak_memory_is_the_fullest_moment(device):
    before = bytes_on(device, 1)

    def run():
        a = bytes_on(device, 4)
        b = bytes_on(device, 8)
        del a
        bytes_on(device, 2)
        del b

    peak = meter.peak_memory(device, run)
    assert peak.bytes == 12 * MEGABYTE
    assert peak.by_op == {"aten::empty": 12 * MEGABYTE}
    if device.type == "cpu":
        assert (peak.reserved_bytes, peak.graph_pool_bytes) == (None, None)
    else:
        assert peak.reserved_bytes >= 13 * MEGABYTE
    nothing = meter.peak_memory(device, lambda: None)
    assert (nothing.bytes, nothing.by_op) == (0, {})
    assert peak.graph_pool_bytes == nothing.graph_pool_bytes
    del before


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_kept(reentrant):
    x = torch.randint(20, (8, 32))
    peaks = []
    for way in (None, reentrant):
        model = DroppingGpt((20, 32, 32, 2, 4), reentrant=way)
        peaks.append(meter.peak_memory(CPU, lambda model=model: model(x).sum().backward()).bytes)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_pool_of_a_graph_is_seen():
    def run():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bytes_on("cuda", 64).fill_(1)
        graph.replay()
        return graph

    before = meter.peak_memory(torch.device("cuda"), lambda: None).graph_pool_bytes  # memory of earlier compilations
    assert meter.peak_memory(torch.device("cuda"), run).graph_pool_bytes - before >= 64 * MEGABYTE


def test_what_was_live_at_the_peak_is_named_by_the_operator_that_asked_for_it(device):
    def run():
        x = torch.ones(MEGABYTE, device=device)  # 4 MB
        y = x.to(torch.float64)  # 8 MB
        gone = bytes_on(device, 16)
        del gone
        z = torch.relu(x)  # perhaps where that lay
        m = torch.empty_like(y)
        del x, y, z, m
        bytes_on(device, 20)

    peak = meter.peak_memory(device, run)
    sizes = {"aten::empty": 16, "aten::_to_copy": 8, "aten::ones": 4}
    assert peak.by_op == {name: size * MEGABYTE for name, size in sizes.items()}
    assert peak.bytes == 28 * MEGABYTE


def test_a_freed_tensor_is_not_at_the_peak_though_its_address_is_used_again():
    """The trace is written by hand: nested operators, two threads, an address that is used twice, an older tensor."""

    def op(name, start, end, thread=1):
        return {"cat": "cpu_op", "name": name, "tid": thread, "ts": start, "dur": end - start}

    def change(time, address, size, thread=1, device=0):
        return {"name": "[memory]", "tid": thread, "ts": time,
                "args": {"Addr": address, "Bytes": size, "Device Type": device}}  # fmt: skip

    events = [
        change(2, 0xA, 10), op("aten::mm", 0, 9), op("aten::empty", 1, 3),
        change(4, 0xA, -10),
        op("aten::add", 10, 20), op("aten::relu", 10, 12), change(11, 0xA, 30), change(13, 0xB, 5),
        op("aten::other", 12, 30, thread=2), change(14, 0xC, 7, thread=2), change(14.5, 0xE, 1000, device=1),
        change(21, 0xD, 2),
        change(22, 0x0, -40), change(23, 0xF, 30),
    ]  # fmt: skip
    peak, by_op = meter._fullest(events, CPU)
    assert peak == 44
    assert by_op == {"aten::relu": 30, "aten::other": 7, "aten::add": 5, "-": 2}
    assert list(by_op) == ["aten::relu", "aten::other", "aten::add", "-"]
    assert meter._fullest(events, torch.device("cuda")) == (1000, {"aten::add": 1000})


def test_thousands_of_events_are_read_in_no_time():
    n = 20_000
    events = [{"cat": "cpu_op", "name": f"op{i % 7}", "tid": 1, "ts": 10 * i, "dur": 5} for i in range(n)]
    events += [
        {"name": "[memory]", "tid": 1, "ts": 10 * i + 1, "args": {"Addr": i, "Bytes": 1, "Device Type": 0}}
        for i in range(n)
    ]
    start = time.perf_counter()
    peak, by_op = meter._fullest(events, CPU)
    assert time.perf_counter() - start < 2  # 0.1 s; quadratic time would be minutes
    assert peak == sum(by_op.values()) == n


def test_the_resident_set_grows_by_what_is_touched_and_its_peak_starts_again():
    if not meter.reset_peak_rss():
        pytest.skip("needs a writable /proc/self/clear_refs")
    before = meter.rss_bytes()
    touched = torch.ones(64 * MEGABYTE, dtype=torch.uint8)
    assert meter.rss_bytes() - before == pytest.approx(64 * MEGABYTE, rel=0.05)
    del touched
    assert meter.peak_rss_bytes() - before == pytest.approx(64 * MEGABYTE, rel=0.05)
    assert meter.reset_peak_rss()
    assert meter.peak_rss_bytes() - before == pytest.approx(0, abs=6e6)


def test_without_proc_the_peak_is_the_processs_own_account(monkeypatch):
    monkeypatch.setattr(meter, "_proc_status", lambda *_: None)
    assert meter.rss_bytes() is None
    assert meter.peak_rss_bytes() > 50e6  # torch is loaded


class FakeAllocator:
    """The part of torch's CUDA allocator that the meter asks. cuBLAS takes a workspace at its first product."""

    WORKSPACE = 32 * MEGABYTE

    def __init__(self, monkeypatch):
        self.level, self.peak, self.workspaces = 7 * MEGABYTE, 0, 1  # a workspace that an earlier run left
        self.level += self.WORKSPACE
        said = {
            "synchronize": lambda _: None, "empty_cache": lambda: None, "current_device": lambda: 0,
            "reset_peak_memory_stats": lambda _: setattr(self, "peak", self.level),
            "memory_allocated": lambda _: self.level, "max_memory_allocated": lambda _: self.peak,
            "max_memory_reserved": lambda _: 2 * self.peak,
            "memory_snapshot": lambda: [{"device": 0, "total_size": 5, "segment_pool_id": (0, 1)},
                                        {"device": 0, "total_size": 9, "segment_pool_id": (0, 0)}],
        }  # fmt: skip
        for name, function in said.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)

    def take(self, size):
        self.level += size
        self.peak = max(self.peak, self.level)

    def product(self):
        self.workspaces += 1
        self.take(self.WORKSPACE)

    def clear(self):
        self.level -= self.workspaces * self.WORKSPACE
        self.workspaces = 0


def test_the_workspaces_of_cublas_are_charged_to_the_run_that_uses_them(monkeypatch):
    allocator = FakeAllocator(monkeypatch)

    def run():
        allocator.product()  # forward
        allocator.take(20 * MEGABYTE)
        allocator.product()  # backward has a thread, and so a handle, of its own
        allocator.take(-20 * MEGABYTE)

    peak = meter.peak_memory(torch.device("cuda"), run)
    assert peak.bytes == (2 * 32 + 20) * MEGABYTE
    assert peak.workspace_bytes == 2 * 32 * MEGABYTE
    assert peak.graph_pool_bytes == 5
    assert allocator.level == 7 * MEGABYTE  # the memory of others stays


def test_a_torch_that_cannot_clear_workspaces_has_none(monkeypatch):
    FakeAllocator(monkeypatch)
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    assert meter.free_cublas_workspaces(torch.device("cuda")) == 0
