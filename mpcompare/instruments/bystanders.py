"""The load of the machine beside a timed block: its clock, the cause that slows it, and the cores that others use."""

import contextlib
import ctypes
import functools
import os
import subprocess
import time
from pathlib import Path

import torch

Load = dict[str, float | str | None]

_NVML_CLOCK_SM = 1
# nvidia-smi -q's names for the bits of clocks_event_reasons.active (NVML, nvmlClocksEventReasons)
_THROTTLE = {
    0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}  # fmt: skip


class Bystanders:
    """Observes what else the machine does from :meth:`start` to :meth:`stop`; a value that cannot be read is None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        self._busy, self._own, self._time = _busy_seconds(), time.process_time(), time.perf_counter()

    def stop(self) -> Load:
        """Returns the load since :meth:`start`.

        ``other_cores`` is the number of CPU cores that others kept busy, the hypervisor's share (steal) included.
        ``clock_mhz`` and ``throttle`` are the clock, and the cause that slows a GPU's as NVML names it, right
        afterwards.
        """
        seconds = time.perf_counter() - self._time
        busy = _busy_seconds()
        others = None
        if busy is not None and self._busy is not None:
            others = max(busy - self._busy - (time.process_time() - self._own), 0.0) / seconds
        clock, throttle = _gpu(self.device) if self.device.type == "cuda" else (_cpu_mhz(), None)
        return {"clock_mhz": clock, "other_cores": others, "throttle": throttle}


class Rest:
    """Observes how much this process computes while others have their turns, with its threads and child processes."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Marks the end of a turn."""
        self._own, self._time = _own_seconds(), time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Marks the start of the next turn. Returns the number of cores that were kept busy in between, the seconds
        that passed, and those of CPU time that were used."""
        used, seconds = max(_own_seconds() - self._own, 0.0), time.perf_counter() - self._time
        return {"cores_between_turns": used / seconds, "s_between_turns": seconds, "cpu_s_between_turns": used}


def _own_seconds() -> float:
    """Returns the CPU seconds of this process and of its children: those that live, and those that it waited for."""
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
    """Returns the CPU seconds of a process, those of children that it waited for included; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float | None:
    """Returns the CPU seconds that all processes of the machine have used since it started."""
    try:
        user, nice, system, _idle, _iowait, irq, softirq, steal = (
            int(field) for field in Path("/proc/stat").read_text().split()[1:9]
        )
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_mhz() -> float | None:
    """Returns the mean clock of the cores in the first 64 KB of /proc/cpuinfo."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            lines = file.read(1 << 16).splitlines()
        values = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz") and line.split(":")[1]]
        return sum(values) / len(values)
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None


def _gpu(device: torch.device) -> tuple[float | None, str | None]:
    """Returns the GPU's clock and what throttles it, from NVML itself, which takes microseconds.

    While nvidia-smi starts, the clock of an idle GPU falls.
    """
    nvml = _nvml()
    if nvml is None:
        return None, None
    handle, mhz, reasons = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_ulonglong()
    if nvml.nvmlDeviceGetHandleByUUID(_uuid(device).encode(), ctypes.byref(handle)):
        return None, None
    no_clock = nvml.nvmlDeviceGetClockInfo(handle, _NVML_CLOCK_SM, ctypes.byref(mhz))
    no_reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
    throttle = "+".join(name for bit, name in _THROTTLE.items() if reasons.value & bit) or "none"
    return (None if no_clock else float(mhz.value)), (None if no_reasons else throttle)


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    """Returns the driver's library, whose functions return 0 on success; None where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() else nvml


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def nvidia_smi(device: torch.device, fields: str) -> list[str]:
    """Returns the answer of nvidia-smi to ``--query-gpu=fields`` for this GPU; empty where there is none."""
    command = ["nvidia-smi", f"--id={_uuid(device)}"]
    command += [f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [field.strip() for field in answer.strip().split(",")]
