"""Data that needs no files and no internet: scikit-learn's digits, and seeded random samples."""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mpcompare.errors import check_choice, check_whole
from mpcompare.tasks.data.dataset import Dataset


def digits(seed: int, samples: int) -> Dataset:
    """Returns scikit-learn's handwritten digits (1,797 images of 8 x 8), upsampled and augmented.

    Images are fp32 ``[samples, 1, 28, 28]`` with pixels in [-1, 1], labels int64 ``[samples]``.
    Held out: the last 297 images, as they are. Training samples cycle through the first 1,500, each with a shift of up
    to 2 pixels and a rotation of up to 15 degrees drawn from ``seed``; the first round is not augmented.
    """
    check_whole("data.samples", samples, at_least=1)
    x, y = _scanned()
    held_out = 297
    x_train, y_train, x_test, y_test = x[:-held_out], y[:-held_out], x[-held_out:], y[-held_out:].clone()

    generator = torch.Generator().manual_seed(seed)
    source = torch.arange(samples) % len(x_train)
    random = torch.rand(3, samples, generator=generator) * 2 - 1  # angle, shift x, shift y in [-1, 1]
    random[:, : len(x_train)] = 0
    angle, shift = random[0] * math.radians(15), random[1:] * 2 / 14  # grid coordinates: 28 pixels span [-1, 1]
    affine = torch.stack([angle.cos(), -angle.sin(), shift[0], angle.sin(), angle.cos(), shift[1]], dim=1)
    train = _resample(x_train[source], affine.reshape(-1, 2, 3))
    unchanged = torch.tensor([[1.0, 0, 0], [0, 1, 0]]).repeat(held_out, 1, 1)
    test = _resample(x_test, unchanged)
    return Dataset("digits", "asked for", train, y_train[source], test, y_test)


@cache
def _scanned() -> tuple[Tensor, Tensor]:
    """Returns all images, fp32 ``[1797, 1, 8, 8]`` in [0, 1], and their labels, from a file of text that is read once:
    parsing it takes longer than all else here. Nobody may write into them."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels).long()


def _resample(images: Tensor, affine: Tensor) -> Tensor:
    """Maps ``[N, 1, 8, 8]`` pixels in [0, 1] by ``affine`` ``[N, 2, 3]`` to ``[N, 1, 28, 28]`` in [-1, 1]."""
    grid = F.affine_grid(affine, [len(images), 1, 28, 28], align_corners=False)
    sampled = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return (sampled - 0.5) / 0.5


def synthetic(seed: int, samples: int, in_features: int, out_features: int, loss: str) -> Dataset:
    """Returns normal inputs ``[samples, in_features]``, and targets from a seeded random two-layer network.

    The targets are the network's outputs, fp32 ``[samples, out_features]``, for the loss ``mse``, and the largest
    output's index, int64 ``[samples]``, for ``cross_entropy``. So there is much to learn. An eighth as many samples are
    held out.
    """
    for name, value in (("samples", samples), ("in_features", in_features), ("out_features", out_features)):
        check_whole(f"data.{name}", value, at_least=1)
    check_choice("data.loss", loss, ("cross_entropy", "mse"))
    generator = torch.Generator().manual_seed(seed)
    held_out, rank = max(samples // 8, 1), 64
    x = torch.randn(samples + held_out, in_features, generator=generator)
    inner = torch.randn(in_features, rank, generator=generator) / math.sqrt(in_features)
    outer = torch.randn(rank, out_features, generator=generator) / math.sqrt(rank)
    y = torch.tanh(2 * x @ inner) @ outer
    if loss == "cross_entropy":
        y = y.argmax(dim=1)
    return Dataset("synthetic", "asked for", x[:samples], y[:samples], x[samples:], y[samples:])


def synthetic_images(seed: int, samples: int) -> Dataset:
    """Returns colour images of ten classes: fp32 ``[samples, 3, 32, 32]``, mean 0, variance 1; int64 labels.

    Each class is a smooth pattern drawn from ``seed``; an image is its class's pattern in a random strength, shifted by
    up to 4 pixels, under noise. An eighth as many images are held out.
    """
    check_whole("data.samples", samples, at_least=1)
    generator = torch.Generator().manual_seed(seed)
    patterns = F.interpolate(torch.randn(10, 3, 5, 5, generator=generator), (40, 40), mode="bicubic")
    n = samples + max(samples // 8, 1)
    y = torch.randint(10, (n,), generator=generator)
    strength = torch.rand(n, generator=generator) + 0.5
    shifts = torch.randint(9, (n, 2), generator=generator)
    x = torch.randn(n, 3, 32, 32, generator=generator)
    for image, label, by, (down, right) in zip(x, y, strength, shifts.tolist(), strict=True):
        image.add_(patterns[label, :, down : down + 32, right : right + 32] * by)
    x = x.sub_(x.mean()).div_(x.std())
    return Dataset("synthetic_images", "asked for", x[:samples], y[:samples], x[samples:], y[samples:])
