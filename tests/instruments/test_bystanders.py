"""The load of the machine, and the reasons for which a GPU is held back."""

import functools
import subprocess
import sys
import time
import types

import psutil
import pynvml
import pytest
import torch

from mpcompare.instruments import bystanders
from mpcompare.instruments.bystanders import Bystanders, Rest

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def nvml(monkeypatch):
    """Returns the answers of a driver by function; one that is an error is raised."""
    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetClockInfo": 1755,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4 | 0x20,
        "nvmlSystemGetDriverVersion": "580.65.06",
    }
    asked = {"nvmlDeviceGetHandleByUUID": ("GPU-12ab",), "nvmlDeviceGetClockInfo": ("handle", pynvml.NVML_CLOCK_SM)}

    def answer(name, *arguments):
        assert arguments == asked.get(name, arguments)
        if isinstance(answers[name], Exception):
            raise answers[name]
        return answers[name]

    for name in answers:
        monkeypatch.setattr(pynvml, name, functools.partial(answer, name))
    monkeypatch.setattr(bystanders, "_init", pynvml.nvmlInit)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="12ab"))
    return answers


def test_a_gpus_clock_and_what_holds_it_back_are_read_from_nvml(nvml):
    others = Bystanders(CUDA)
    others.start()
    seen = others.stop()
    assert (seen["clock_mhz"], seen["throttle"]) == (1755.0, "sw_power_cap+sw_thermal_slowdown")
    assert bystanders.driver_version() == "580.65.06"
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml["nvmlDeviceGetClockInfo"] = refused
    assert bystanders._gpu(CUDA) == (None, "sw_power_cap+sw_thermal_slowdown")
    nvml["nvmlDeviceGetClockInfo"], nvml["nvmlDeviceGetCurrentClocksThrottleReasons"] = 1755, refused
    assert bystanders._gpu(CUDA) == (1755.0, None)
    nvml["nvmlDeviceGetHandleByUUID"] = refused
    assert bystanders._gpu(CUDA) == (None, None)


def test_without_the_drivers_library_nothing_is_known(nvml):
    nvml["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert bystanders._gpu(CUDA) == (None, None)
    assert bystanders.driver_version() is None


def test_a_clock_that_is_cut_off_is_none(monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(bystanders, "Path", lambda _: file)
    clocks = "cpu MHz\t\t: 2450.000\ncpu MHz\t\t: 3000.000\n"
    for kept in (12, 15, 19, 20):  # characters of the third line, which has 20
        flags = "flags\t\t: " + "x" * ((1 << 16) - len(clocks) - 10 - kept) + "\n"
        file.write_text(clocks + flags + "cpu MHz\t\t: 2450.000\nflags\t\t: x\n")
        assert bystanders._cpu_mhz() == (2725 if kept < 20 else pytest.approx(7900 / 3))


@pytest.mark.parametrize(("seconds", "cores"), [(0.005, None), (0.1, 2.0), (1.0, 0.5)])
def test_others_keep_no_more_cores_busy_than_there_are_and_a_short_block_tells_nothing(monkeypatch, seconds, cores):
    others, busy = Bystanders(CPU), iter([1.0, 1.5])
    monkeypatch.setattr(bystanders, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(bystanders, "time", types.SimpleNamespace(process_time=lambda: 0.0, perf_counter=lambda: 0.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    others.start()
    bystanders.time.perf_counter = lambda: seconds
    assert others.stop()["other_cores"] == cores


@pytest.mark.slow
def test_the_load_of_the_machine_is_seen():
    bystanders = Bystanders(CPU)
    bystanders.start()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(1)
    load = bystanders.stop()
    other.kill()
    assert set(load) == {"clock_mhz", "other_cores", "throttle"}
    assert load["other_cores"] > 0.3
    assert load["throttle"] is None


def test_what_a_process_computes_between_its_turns_is_seen():
    """The bounds are the process's own clock: what a look itself costs is no constant on a busy machine."""
    rest = Rest()
    for computes_s in (0.0, 0.1):
        before = time.process_time()
        rest.start()
        time.sleep(0.2)
        end = time.process_time() + computes_s
        while time.process_time() < end:
            pass
        seen = rest.stop()
        assert computes_s <= seen["cpu_s_between_turns"] <= time.process_time() - before
        assert seen["s_between_turns"] >= 0.2 + computes_s
        assert seen["cores_between_turns"] == seen["cpu_s_between_turns"] / seen["s_between_turns"]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_what_its_children_compute_is_its_own(ends):
    last = "" if ends else "; time.sleep(60)"
    program = f"import sys, time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True){last}"
    rest = Rest()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "done\n"
        if ends:
            child.wait()
        found = rest.stop()
        child.kill()
    assert 0.25 <= found["cpu_s_between_turns"] < 1
