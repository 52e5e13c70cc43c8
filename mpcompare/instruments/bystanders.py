"""The load of the machine during a timed block: its clock, the cause that slows it, and the cores that others use."""

import contextlib
import functools
import math
import os
import time
from pathlib import Path

import psutil
import pynvml
import torch

Load = dict[str, float | str | None]

# nvidia-smi -q's names for the bits of clocks_event_reasons.active (NVML, nvmlClocksEventReasons)
_THROTTLE = {
    0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}  # fmt: skip
# The system counts CPU time in ticks of 10 ms. One tick too many at each end is a quarter of a core in this time.
SHORTEST_S = 0.08
_init = functools.cache(pynvml.nvmlInit)


class Bystanders:
    """Observes what else the machine does from :meth:`start` to :meth:`stop`; a value that cannot be read is None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        self._busy, self._own, self._time = _busy_seconds(), time.process_time(), time.perf_counter()

    def stop(self) -> Load:
        """Returns the load since :meth:`start`.

        ``other_cores`` is the number of CPU cores that others kept busy, the hypervisor's share (steal) included. It
        is None after less than :data:`SHORTEST_S`.
        ``clock_mhz`` is the clock right afterwards. ``throttle`` is the cause that slows a GPU's clock then, as NVML
        names it.
        """
        seconds = time.perf_counter() - self._time
        busy, own = _busy_seconds() - self._busy, time.process_time() - self._own
        cores = None if seconds < SHORTEST_S else min(max(busy - own, 0.0) / seconds, psutil.cpu_count() or math.inf)
        clock, throttle = _gpu(self.device) if self.device.type == "cuda" else (_cpu_mhz(), None)
        return {"clock_mhz": clock, "other_cores": cores, "throttle": throttle}


class Rest:
    """Observes how much this process computes while others have their turns, with its threads and child processes."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Marks the end of a turn."""
        self._own, self._time = _own_seconds(), time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Marks the start of the next turn. Returns the number of cores that were kept busy in between, the seconds
        that passed, and the seconds of CPU time that were used."""
        used, seconds = max(_own_seconds() - self._own, 0.0), time.perf_counter() - self._time
        return {"cores_between_turns": used / seconds, "s_between_turns": seconds, "cpu_s_between_turns": used}


def _own_seconds() -> float:
    """Returns the CPU seconds of this process and its children: living children, and children that it waited for."""
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + sum(map(_seconds_of, _children("self")))


def _children(process: int | str) -> list[int]:
    """Returns the children of a process and theirs; none where the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *_children(child)]
    return found


def _seconds_of(process: int) -> float:
    """Returns the CPU seconds of a process and of the children that it waited for; 0 where the process is gone."""
    try:
        return float(sum(psutil.Process(process).cpu_times()[:4]))
    except psutil.Error:
        return 0.0


def _busy_seconds() -> float:
    """Returns the CPU seconds that all processes of the machine have used since it started."""
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def _cpu_mhz() -> float | None:
    """Returns the mean clock of the cores in the first 64 KB of /proc/cpuinfo."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            lines = file.read(1 << 16).split("\n")[:-1]  # the last line may be cut off
        values = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz") and line.split(":")[1]]
        return sum(values) / len(values)
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None


def _gpu(device: torch.device) -> tuple[float | None, str | None]:
    """Returns the GPU's clock and what throttles it, from NVML itself, which takes microseconds.

    While nvidia-smi starts, the clock of an idle GPU falls.
    """
    clock = throttle = None
    with contextlib.suppress(pynvml.NVMLError):
        _init()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        with contextlib.suppress(pynvml.NVMLError):
            clock = float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)  # drivers before 535 know this name alone
        throttle = "+".join(name for bit, name in _THROTTLE.items() if reasons & bit) or "none"
    return clock, throttle


def driver_version() -> str | None:
    """Returns the version of the GPU's driver; None where there is none."""
    with contextlib.suppress(pynvml.NVMLError):
        _init()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None
