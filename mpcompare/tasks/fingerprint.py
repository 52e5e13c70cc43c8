"""A hash of tensors, equal where they are bit for bit the same."""

import hashlib
from collections.abc import Mapping

import torch

from mpcompare.tasks.batch import Batch, named


def fingerprint(tensors: Mapping[str, Batch]) -> str:
    """Returns the first 16 hex digits of the SHA-256 over names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in (leaf for each in tensors.items() for leaf in named(*each)):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)  # numpy has no bf16
    return digest.hexdigest()[:16]
