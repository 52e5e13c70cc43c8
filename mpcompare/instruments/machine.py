"""The provenance of a result: versions, device, flags, commit."""

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from mpcompare.errors import InputError, check_choice
from mpcompare.fields import ProvenanceRecord
from mpcompare.foreign import version
from mpcompare.instruments import fp32_products
from mpcompare.instruments.bystanders import driver_version
from mpcompare.records import host


def select_device(device: str) -> torch.device:
    """Returns the device of this name; ``auto`` is CUDA where there is a GPU, else the CPU. Raises InputError where
    there is no such device."""
    check_choice("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        reason = "torch finds no GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise InputError("device", device, f"{reason}; use device=cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Returns the GPU's or the CPU's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def set_deterministic(only: bool) -> None:
    """Lets torch take only algorithms that give the same bits every time; an operator without one raises RuntimeError
    then. False: any algorithm."""
    if only:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(only)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
    torch.backends.cudnn.deterministic = only


_ENVIRONMENT = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS", "NVIDIA_TF32",
    "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "MPCOMPARE_AMX",
)  # fmt: skip


def provenance(device: torch.device) -> ProvenanceRecord:
    """Returns the provenance of a result that is computed now."""
    packages = ("mpcompare", "torch", "torchvision", "hydra-core", "numpy")
    on_gpu = device.type == "cuda"
    return ProvenanceRecord(
        device=device.type,
        device_name=device_name(device),
        host=host(),
        threads=torch.get_num_threads(),
        cpu_count=os.cpu_count(),
        platform=platform.platform(),
        python=platform.python_version(),
        versions={name: version(name) for name in packages},
        cuda=torch.version.cuda if on_gpu else None,
        driver=driver_version() if on_gpu else None,
        flags={
            "tf32": fp32_products.precisions()["cuda.matmul"] == "tf32",
            **{f"fp32_precision {name}": value for name, value in fp32_products.precisions().items()},
            "fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        },
        environment=_environment(),
        commit=_commit(),
    )


def _environment() -> dict[str, str]:
    """Returns the variables that change speed. Folders say nothing to others: of LD_PRELOAD the names of its files are
    left, and any other path is left out."""
    known = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)}
    if "LD_PRELOAD" in known:
        known["LD_PRELOAD"] = re.sub(r"[^\s:]*/", "", known["LD_PRELOAD"])
    return {name: value for name, value in known.items() if "/" not in value}


def _commit() -> str | None:
    """Returns the commit of this checkout, with ``-dirty`` where files differ from it; None outside a checkout.

    ``$MPCOMPARE_COMMIT`` can name it where the files were copied without their history.
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
