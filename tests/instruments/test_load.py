import types

import pytest
import torch

from mpcompare.instruments import bystanders as load

CUDA = torch.device("cuda")


class Nvml:
    """The driver's library as ctypes sees it: fills what it is pointed at, returns 0 where it could."""

    failing = ()

    def __getattr__(self, name):
        def call(*arguments):
            value = {
                "nvmlDeviceGetHandleByUUID": 1,
                "nvmlDeviceGetClockInfo": 1755,
                "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4 | 0x20,
            }[name]
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments[0] == b"GPU-12ab"
            if name == "nvmlDeviceGetClockInfo":
                assert arguments[1] == 1  # NVML_CLOCK_SM
            arguments[-1]._obj.value = value
            return int(name in self.failing)

        return call


@pytest.fixture
def nvml(monkeypatch):
    nvml = Nvml()
    monkeypatch.setattr(load, "_nvml", lambda: nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="12ab"))
    return nvml


def test_a_gpus_clock_and_what_holds_it_back_are_read_from_nvml(nvml):
    others = load.Bystanders(CUDA)
    others.start()
    seen = others.stop()
    assert (seen["clock_mhz"], seen["throttle"]) == (1755.0, "sw_power_cap+sw_thermal_slowdown")
    nvml.failing = ("nvmlDeviceGetCurrentClocksThrottleReasons",)
    assert load._gpu(CUDA) == (1755.0, None)
    nvml.failing = ("nvmlDeviceGetHandleByUUID",)
    assert load._gpu(CUDA) == (None, None)


def test_without_the_drivers_library_nothing_is_known(monkeypatch):
    def missing(_):
        raise OSError

    monkeypatch.setattr(load.ctypes, "CDLL", missing)
    load._nvml.cache_clear()
    try:
        assert load._gpu(CUDA) == (None, None)
    finally:
        load._nvml.cache_clear()
