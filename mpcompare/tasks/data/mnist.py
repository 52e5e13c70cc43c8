"""MNIST (LeCun, Cortes, Burges): pixels p in [0, 1] become (p - 0.5) / 0.5, so they lie in [-1, 1]."""

from mpcompare.errors import InputError
from mpcompare.tasks.data.dataset import Dataset
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.data.source import Source, find_root

SOURCE = Source(
    name="MNIST",
    reader="MNIST",
    folder="MNIST/raw",
    md5={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    mirror="https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz",  # torchvision's first mirror
    script="import sys; from torchvision.datasets import MNIST; MNIST(root=sys.argv[1], download=True)",
    normalise=lambda pixels: (pixels.unsqueeze(1) / 255 - 0.5) / 0.5,
)


def mnist(seed: int, root: str | None = None) -> Dataset:
    """Returns MNIST, fp32 ``[N, 1, 28, 28]``, from ``root`` (None: ``paths.data_root``); downloads it if it is missing.
    Raises InputError where it cannot be downloaded, or a file is not MNIST's."""
    taken = SOURCE.take(root, limit_s=600)
    if isinstance(taken, str):
        raise InputError("data.root", find_root(root)[0], f"MNIST is not there and cannot be downloaded ({taken})")
    return taken


def auto(seed: int, samples: int, root: str | None = None, download_limit_s: float = 15) -> Dataset:
    """Returns MNIST where it is on disk or downloads within ``download_limit_s`` seconds, else ``samples`` digits."""
    loudly = "scikit-learn's DIGITS, NOT MNIST"
    return SOURCE.take_or_stand_in("data=auto", root, download_limit_s, loudly, lambda: digits(seed, samples))
