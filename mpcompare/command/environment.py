"""``mpcompare env``: what the report of a fault needs. It works without torch, too, and then reports that."""

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

from mpcompare.foreign import version as installed_version
from mpcompare.foreign import without_folders

PACKAGES = ("torch", "torchvision", "hydra-core", "numpy")
# The instruction sets that decide how fast products in 16 bits are, as /proc/cpuinfo names them on x86 and ARM.
SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimdhp", "bf16", "i8mm", "sve")


def show_environment(version: str) -> None:
    """Prints the versions, then the machine as torch sees it. Neither folders nor the name of a host are among them."""
    _say("mpcompare", version)
    _say("python", f"{platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        _say(package, installed_version(package) or "not installed")
    try:
        import torch  # it takes seconds, and may be what is broken
    except Exception as error:
        _say("torch", f"cannot be imported ({type(error).__name__}: {error})")
        return
    from mpcompare.instruments.machine import provenance, select_device

    cpu, device = torch.device("cpu"), select_device("auto")
    known = provenance(cpu)
    _say("commit", known.commit or "not known")
    _say("CPU", f"{known.device_name}, {os.cpu_count()} cores, torch takes {known.threads}")
    sets = ", ".join(_instructions()) or "not known"
    _say("ISA", f"{torch.backends.cpu.get_cpu_capability()} in torch; of the CPU: {sets}")
    if device.type == "cuda":
        gpu = provenance(device)
        _say("GPU", f"{gpu.device_name}, CUDA {gpu.cuda}, driver {gpu.driver or 'not known'}")
    else:
        built_with = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        _say("GPU", f"none, torch is built {built_with}")
    for name, value in known.flags.items():
        _say("flag", f"{name}={value}")
    for name, value in known.environment.items():
        _say("variable", f"{name}={value}")
    for part, built in _native(device.type).items():
        _say("operators", f"{part}: {built}")


def _instructions() -> list[str]:
    """Returns the instruction sets of ``SETS`` that the CPU has."""
    try:
        flags = re.findall(r"^(?:flags|Features)\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return []
    return [name for name in SETS if flags and name in flags[0].split()]


def _native(device: str) -> dict[str, str]:
    """Returns whether the native operators of each device are built; nothing is built here."""
    from mpcompare.native.build import BuildCommand, BuildError, cpu_recipe, cuda_recipe, is_built
    from mpcompare.native.ops import gpu_arch

    def said(recipe: Callable[[], BuildCommand]) -> str:
        try:
            return "built" if is_built(recipe()) else "not built yet"
        except (BuildError, OSError) as error:
            return f"cannot be built ({error})"

    parts = {"cpu": said(cpu_recipe)}
    return parts | ({"cuda": said(lambda: cuda_recipe(gpu_arch()))} if device == "cuda" else {})


def _say(name: str, value: str) -> None:
    print(f"{name:12}{without_folders(value)}")
