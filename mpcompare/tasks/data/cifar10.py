"""CIFAR-10 (Krizhevsky): colour images whose channels have zero mean and unit variance over the training part."""

import numpy as np
import torch
from torch import Tensor

from mpcompare.tasks.data.dataset import Dataset
from mpcompare.tasks.data.generated import synthetic_images
from mpcompare.tasks.data.source import Source

MEAN = (0.4914, 0.4822, 0.4465)  # red, green and blue in [0, 1], over the training images
STD = (0.2470, 0.2435, 0.2616)


def normalise(pixels: np.ndarray) -> Tensor:
    """Maps uint8 ``[N, height, width, 3]`` to fp32 ``[N, 3, height, width]``, in place where possible: it is 600 MB."""
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().contiguous().div_(255)
    return x.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))


SOURCE = Source(
    name="CIFAR-10",
    reader="CIFAR10",
    folder="cifar-10-batches-py",
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
    mirror="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    script="import sys; from torchvision.datasets import CIFAR10; CIFAR10(root=sys.argv[1], download=True)",
    normalise=normalise,
)


def cifar10(seed: int, samples: int, root: str | None = None, download_limit_s: float = 15) -> Dataset:
    """Returns CIFAR-10, fp32 ``[N, 3, 32, 32]``, where it is on disk or downloads within ``download_limit_s`` seconds.

    Elsewhere it returns ``samples`` synthetic images of that shape. Raises InputError where a file on disk is not
    CIFAR-10's."""
    loudly = "SYNTHETIC IMAGES, NOT CIFAR-10"
    return SOURCE.take_or_stand_in(
        "data=cifar10", root, download_limit_s, loudly, lambda: synthetic_images(seed, samples)
    )
