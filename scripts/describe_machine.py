"""Writes the facts of a machine that its results depend on: versions, driver, GPU, its clocks and limits, commit.

python scripts/describe_machine.py FILE [--device auto] [--dataset NAME]
"""

import argparse
import datetime
import subprocess
from pathlib import Path
from typing import Any

import torch

from mpcompare.foreign import version
from mpcompare.instruments import machine
from mpcompare.native import build
from mpcompare.records import write_json

PACKAGES = ("torch", "triton", "torchvision", "numpy", "pandas", "hydra-core", "pytest", "nvidia-cublas")
GPU_FIELDS = (
    "name", "driver_version", "power.limit", "power.default_limit", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "clocks.max.mem", "clocks_event_reasons.active", "temperature.gpu", "pstate", "ecc.mode.current", "memory.total",
)  # fmt: skip


def gpu(device: torch.device) -> dict[str, Any]:
    """Returns the properties of a GPU, and the answers of nvidia-smi to ``GPU_FIELDS``."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        # The fields are asked for one by one: a driver that does not know one of several answers none of them.
        "nvidia_smi": {field: next(iter(nvidia_smi(device, field)), None) for field in GPU_FIELDS},
    }


def nvidia_smi(device: torch.device, fields: str) -> list[str]:
    """Returns the answer of nvidia-smi to ``--query-gpu=fields`` for this GPU; empty where there is none."""
    command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
    command += [f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [field.strip() for field in answer.strip().split(",")]


def nvcc() -> str | None:
    """Returns the release of nvcc, as nvcc prints it; None if there is none."""
    try:
        compiler = build.cuda_recipe("sm_90").compiler
    except build.BuildError:
        return None
    said = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return next((line.strip() for line in said.splitlines() if "release" in line), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dataset", help="name of the data set in use, to be recorded")
    args = parser.parse_args()
    device = machine.select_device(args.device)
    known = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "dataset": args.dataset,
        **vars(machine.provenance(device)),
        "packages": {name: version(name) for name in PACKAGES},
        "nvcc": nvcc(),
        "gpu": gpu(device) if device.type == "cuda" else None,
    }
    write_json(args.file, known, indent=2)
    print(f"{known['device_name']}, driver {known['driver']}, torch {torch.__version__}, commit {known['commit']}")


if __name__ == "__main__":
    main()
