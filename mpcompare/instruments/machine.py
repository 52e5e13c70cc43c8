"""Where a result comes from: versions, device, flags, commit."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mpcompare.errors import InputError, check_choice
from mpcompare.instruments.bystanders import nvidia_smi


def select_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is a GPU, else the CPU; raises InputError for a device that is not there."""
    check_choice("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        reason = "torch finds no GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise InputError("device", device, f"{reason}; use device=cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def set_tf32(allowed: bool) -> None:
    """TF32 for fp32 matrix products on CUDA: a precision of its own here, so off unless it was asked for."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """:func:`set_tf32` for a while."""
    before = torch.backends.cuda.matmul.allow_tf32
    set_tf32(allowed)
    try:
        yield
    finally:
        set_tf32(before)


def set_deterministic(only: bool) -> None:
    """Whether torch may take only algorithms that give the same bits every time; what has none raises RuntimeError."""
    if only:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(only)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
    torch.backends.cudnn.deterministic = only


_ENVIRONMENT = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS", "NVIDIA_TF32",
    "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "MPCOMPARE_AMX",
)  # fmt: skip


def provenance(device: torch.device) -> dict[str, Any]:
    """Everything about the machine and its state that a result may depend on, as observed now."""
    packages = ("mpcompare", "torch", "torchvision", "hydra-core", "numpy")
    return {
        "device": device.type,
        "device_name": device_name(device),
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "driver": ", ".join(nvidia_smi(device, "driver_version")) or None if device.type == "cuda" else None,
        "flags": {
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        },
        "environment": {  # what changes speed without being seen in the configuration
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ENVIRONMENT)
        },
        "commit": _commit(),
    }


def version(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit this package stands at, with ``-dirty`` where files differ from it; None outside a checkout.

    Where the files were copied without their history, ``$MPCOMPARE_COMMIT`` can say it.
    """
    if named := os.environ.get("MPCOMPARE_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
