"""The data sets: whole, normalised, on the device before any timer, served in order in whole batches.

Pixels are normalised to (p - 0.5) / 0.5, so they lie in [-1, 1]. Every data set carries why it was taken and a
fingerprint of what is trained on; ``auto`` says loudly which one it took.
"""

import hashlib
import http.client
import logging
import math
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mpcompare.errors import InputError, check_number
from mpcompare.paths import data_root
from mpcompare.tasks.mlp import Task, fingerprint

log = logging.getLogger(__name__)

MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


@dataclass(frozen=True)
class Dataset:
    """Training and held-out samples.

    Attributes:
        name, reason: which data set, and why this one.
        x_train, x_test: fp32 ``[N, in_features]``.
        y_train, y_test: int64 classes ``[N]``, or fp32 targets ``[N, out_features]``.
    """

    name: str
    reason: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    def to(self, device: torch.device) -> "Dataset":
        """The same data on ``device``."""
        moved = {name: getattr(self, name).to(device) for name in ("x_train", "y_train", "x_test", "y_test")}
        return replace(self, **moved)

    @property
    def fingerprint(self) -> str:
        """Hash of all samples: equal means bit for bit the same data."""
        return fingerprint({n: getattr(self, n) for n in ("x_train", "y_train", "x_test", "y_test")})

    def check(self, task: Task) -> None:
        """Raises InputError unless the samples fit the task's shape, loss and batch size."""
        samples, features = self.x_train.shape
        if features != task.in_features:
            raise InputError("task.in_features", task.in_features, f"data={self.name} has {features} features")
        if task.batch_size > samples:
            raise InputError("task.batch_size", task.batch_size, f"data={self.name} has only {samples} samples")
        if (task.loss == "cross_entropy") == self.y_train.is_floating_point():
            kind = "real-valued targets" if self.y_train.is_floating_point() else "classes"
            raise InputError("task.loss", task.loss, f"data={self.name} has {kind}")
        if task.loss == "cross_entropy" and (classes := int(self.y_train.max()) + 1) > task.out_features:
            raise InputError("task.out_features", task.out_features, f"data={self.name} has {classes} classes")


def batches(dataset: Dataset, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches in order, over and over; a remainder shorter than a batch is left out."""
    while True:
        for first in range(0, len(dataset.x_train) - batch_size + 1, batch_size):
            rows = slice(first, first + batch_size)
            yield dataset.x_train[rows], dataset.y_train[rows]


# ---- MNIST


def mnist(task: Task, seed: int, root: str | None = None) -> Dataset:
    """MNIST (LeCun, Cortes, Burges) from ``root`` (``paths.data_root``), downloaded there if it is missing.

    Raises:
        InputError: it cannot be had, or a file is not MNIST's.
    """
    root, folder = _root(root)
    if _mnist_on_disk(folder):
        return _read_mnist(folder, f"found in {root}")
    if failure := _download_mnist(folder, limit_s=600):
        raise InputError("data.root", root, f"MNIST is not there and cannot be downloaded ({failure})")
    return _read_mnist(folder, f"downloaded to {root}")


def auto(task: Task, seed: int, root: str | None = None, download_limit_s: float = 15) -> Dataset:
    """MNIST where it is on disk or can be downloaded within ``download_limit_s`` seconds, else the bundled digits."""
    check_number("data.download_limit_s", download_limit_s, above=0)
    root, folder = _root(root)
    if _mnist_on_disk(folder):
        dataset = _read_mnist(folder, f"found in {root}")
    elif failure := _download_mnist(folder, download_limit_s):
        dataset = replace(digits(task, seed), reason=f"MNIST is not in {root} and cannot be downloaded ({failure})")
        log.warning("data=auto: using scikit-learn's DIGITS, NOT MNIST: %s", dataset.reason)
        return dataset
    else:
        dataset = _read_mnist(folder, f"downloaded to {root}")
    log.info("data=auto: using MNIST, %s", dataset.reason)
    return dataset


def _root(root: object) -> tuple[str, Path]:
    """The folder as it was named, and as it is."""
    if root is None:
        root = data_root()
    if not isinstance(root, str):
        raise InputError("data.root", root, "expected the name of a folder")
    folder = Path(root).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError("data.root", root, "expected a folder, this is a file")
    return root, folder


def _mnist_on_disk(root: Path) -> bool:
    """Whether the folder means to hold MNIST: if any of its files is there, a missing or broken one is an error."""
    return any((root / "MNIST" / "raw" / name).exists() for name in MNIST_MD5)


def _read_mnist(root: Path, reason: str) -> Dataset:
    raw = root / "MNIST" / "raw"
    for name, expected in MNIST_MD5.items():
        try:
            found = hashlib.md5((raw / name).read_bytes(), usedforsecurity=False).hexdigest()
        except OSError as error:
            raise InputError("data.root", root, f"cannot read {raw / name}: {error.strerror}") from error
        if found != expected:
            size = (raw / name).stat().st_size
            raise InputError(
                "data.root",
                root,
                f"{raw / name} is truncated or not MNIST's ({size} bytes, MD5 {found}, not {expected})",
            )
    try:
        from torchvision.datasets import MNIST
    except (ImportError, RuntimeError, AttributeError) as error:
        raise torchvision_mismatch(error) from error
    tensors = []
    for train in (True, False):
        part = MNIST(root=str(root), train=train, download=False)
        tensors += [(part.data.reshape(len(part.data), -1) / 255 - 0.5) / 0.5, part.targets]
    return Dataset("mnist", reason, *tensors)


def torchvision_mismatch(error: Exception) -> InputError:
    """The error for a torchvision that was built for another torch, or is missing: torchvision fails at import then."""
    from importlib import metadata

    try:
        installed = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        installed = "not installed"
    return InputError(
        "torchvision",
        installed,
        f"does not work with torch {torch.__version__} ({' '.join(str(error).split())}); "
        "install a matching pair: pip install --upgrade torch torchvision",
    )


_DOWNLOAD = "import sys; from torchvision.datasets import MNIST; MNIST(root=sys.argv[1], download=True)"
_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz"  # torchvision's first mirror


def _download_mnist(root: Path, limit_s: float) -> str | None:
    """Downloads MNIST by torchvision; returns why not, or None.

    First a probe, so that a machine without internet loses 3 seconds at most; then the download in a process that can
    be ended, into a folder beside, moved into place file by file, so that no half file is ever taken for a data set.
    """
    failure = ["no answer within 3 s"]

    def probe() -> None:
        try:
            urllib.request.urlopen(_MIRROR, timeout=3).close()
            failure[0] = ""
        except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
            failure[0] = str(getattr(error, "reason", error))

    thread = threading.Thread(target=probe, daemon=True)  # a name lookup may hang for longer than any timeout
    thread.start()
    thread.join(timeout=3)
    if failure[0]:
        return failure[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
            subprocess.run(
                [sys.executable, "-c", _DOWNLOAD, folder], check=True, capture_output=True, text=True, timeout=limit_s
            )
            raw = root / "MNIST" / "raw"
            raw.mkdir(parents=True, exist_ok=True)
            for name in MNIST_MD5:
                (Path(folder) / "MNIST" / "raw" / name).replace(raw / name)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:g} s"
    except subprocess.CalledProcessError as error:
        return (error.stderr.strip().splitlines() or ["torchvision failed"])[-1]
    except OSError as error:
        return str(error)
    return None


# ---- data that needs no internet


def digits(task: Task, seed: int) -> Dataset:
    """scikit-learn's handwritten digits (1,797 images of 8 x 8), upsampled to 28 x 28, augmented to ``task.samples``.

    Held out: the last 297 images, as they are. Training samples cycle through the first 1,500, each with a shift of up
    to 2 pixels and a rotation of up to 15 degrees drawn from ``seed``; the first round is not augmented.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    y = torch.from_numpy(labels).long()
    held_out = 297
    x_train, y_train, x_test, y_test = x[:-held_out], y[:-held_out], x[-held_out:], y[-held_out:]

    generator = torch.Generator().manual_seed(seed)
    source = torch.arange(task.samples) % len(x_train)
    random = torch.rand(3, task.samples, generator=generator) * 2 - 1  # angle, shift x, shift y in [-1, 1]
    random[:, : len(x_train)] = 0
    angle, shift = random[0] * math.radians(15), random[1:] * 2 / 14  # grid coordinates: 28 pixels span [-1, 1]
    affine = torch.stack([angle.cos(), -angle.sin(), shift[0], angle.sin(), angle.cos(), shift[1]], dim=1)
    train = _resample(x_train[source], affine.reshape(-1, 2, 3))
    identity = torch.tensor([[1.0, 0, 0], [0, 1, 0]]).repeat(held_out, 1, 1)
    test = _resample(x_test, identity)
    return Dataset("digits", "asked for", train, y_train[source], test, y_test)


def _resample(images: Tensor, affine: Tensor) -> Tensor:
    """``[N, 1, 8, 8]`` pixels in [0, 1] through ``affine`` ``[N, 2, 3]`` to ``[N, 784]`` in [-1, 1]."""
    grid = F.affine_grid(affine, [len(images), 1, 28, 28], align_corners=False)
    sampled = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return (sampled.reshape(len(images), -1) - 0.5) / 0.5


def synthetic(task: Task, seed: int) -> Dataset:
    """Normal inputs of any width and what a seeded random two-layer network makes of them, so there is much to learn.

    Targets are its outputs for ``mse``, and the largest output's index for ``cross_entropy``. An eighth as many samples
    as the task asks for are held out.
    """
    generator = torch.Generator().manual_seed(seed)
    held_out, rank = max(task.samples // 8, 1), 64
    x = torch.randn(task.samples + held_out, task.in_features, generator=generator)
    inner = torch.randn(task.in_features, rank, generator=generator) / math.sqrt(task.in_features)
    outer = torch.randn(rank, task.out_features, generator=generator) / math.sqrt(rank)
    y = torch.tanh(2 * x @ inner) @ outer
    if task.loss == "cross_entropy":
        y = y.argmax(dim=1)
    n = task.samples
    return Dataset("synthetic", "asked for", x[:n], y[:n], x[n:], y[n:])
