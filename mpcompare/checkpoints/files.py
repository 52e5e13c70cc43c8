"""The two files of one checkpoint: ``state.safetensors``, and ``checkpoint.json``, whose first line is a digest.

The SHA-256 in that line is of all bytes after the line, and these bytes hold the SHA-256 of ``state.safetensors``. So
no byte of either file can change unnoticed, and a file of one checkpoint is not taken for a file of another. The digest
is no signature: anybody can write a checkpoint by hand.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mpcompare.checkpoints.checkpoint import Checkpoint, put_together, take_apart
from mpcompare.errors import InputError
from mpcompare.foreign import parsed, read_bytes

TENSORS, CONTENT = "state.safetensors", "checkpoint.json"
FORMAT, VERSION = "mpcompare checkpoint", 1
# safetensors 0.7 writes and reads these
DTYPES = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
}  # fmt: skip


class Unreadable(Exception):  # noqa: N818 - it describes a checkpoint
    """A folder does not hold the two files as they were written. The reason is one line."""


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes both files into ``folder``, which exists and is empty, and returns when they are on the disk. Raises
    OSError or SafetensorError where they cannot be written, and InputError where a tensor cannot be held, or the state
    is none of the contract's. The folder holds no checkpoint then."""
    tensors, rest = take_apart(checkpoint)
    file = folder / TENSORS
    save_file(_apart(tensors), file, metadata={"format": "pt"})
    with ThreadPoolExecutor(1) as other:  # the disk writes while a core hashes
        flushed = other.submit(flush, file)
        digest, size = _digest(file), file.stat().st_size
        flushed.result()
    content = {"format": FORMAT, "version": VERSION, **rest, "tensors": {"bytes": size, "sha256": digest}}
    body = json.dumps(content, indent=1, allow_nan=False)[2:] + "\n"  # without its first brace: the first line has it
    (folder / CONTENT).write_bytes((_first_line(body.encode()) + "\n").encode() + body.encode())
    for path in (file, folder / CONTENT):
        path.chmod(0o644)
    flush(folder / CONTENT)
    flush(folder)


def read(folder: Path) -> Checkpoint:
    """Verifies every byte of both files, then reads them: tensors on the CPU, contiguous, in memory of their own.
    Raises Unreadable where something is wrong with them."""
    content = _read_content(folder / CONTENT)
    try:
        noted = content["tensors"]
        _check_tensors(folder / TENSORS, noted["bytes"], noted["sha256"])
        with safe_open(folder / TENSORS, framework="pt") as file:
            # A tensor from the file is mapped, and a read error in it would end the process.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
        return put_together(tensors, content)
    except OSError as error:
        raise Unreadable(f"{TENSORS} cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise Unreadable(f"{TENSORS} is no safetensors file ({error})") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"{CONTENT} and {TENSORS} do not belong together ({error!r})") from error


def _read_content(file: Path) -> dict[str, Any]:
    try:
        raw = read_bytes(file)
    except FileNotFoundError as error:
        raise Unreadable(f"there is no {CONTENT}") from error
    except OSError as error:
        raise Unreadable(f"{CONTENT} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise Unreadable(str(error)) from error
    try:
        content = parsed(raw)
    except ValueError as error:
        raise Unreadable(f"{CONTENT} is no JSON, or is cut off ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Unreadable(f"{CONTENT} is none of mpcompare's")
    if content.get("version") != VERSION:  # checked before the digest: another version may have another digest
        raise Unreadable(f"it has format version {content.get('version')}, and this mpcompare reads {VERSION}")
    first, _, body = raw.partition(b"\n")
    if first != _first_line(body).encode():
        raise Unreadable(f"{CONTENT} has been changed: its content does not have the SHA-256 in its first line")
    return content


def _check_tensors(file: Path, size: int, digest: str) -> None:
    """Raises Unreadable unless the file has the size and the digest that were noted."""
    try:
        status = file.stat()
    except FileNotFoundError as error:
        raise Unreadable(f"there is no {TENSORS}") from error
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
        raise Unreadable(f"{TENSORS} is no regular file")
    if status.st_size != size:
        raise Unreadable(f"{TENSORS} has {status.st_size} bytes, and {CONTENT} says {size}")
    if size > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise Unreadable(f"{TENSORS} has {size} bytes, and this machine has {memory} bytes of memory")
    if (found := _digest(file)) != digest:
        raise Unreadable(f"{TENSORS} has SHA-256 {found[:16]}..., and {CONTENT} says {digest[:16]}...")


def _first_line(body: bytes) -> str:
    return f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",'


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the same values as safetensors takes them: on the CPU, contiguous, and no two in the same memory.

    Each name has its own values in the file, tied or not: the network says what is tied. Most are not copied.
    """
    apart = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
            raise InputError(f"checkpoint of {name}", kind, "safetensors cannot hold it")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        apart[name] = plain if plain.numel() else torch.empty(plain.shape, dtype=plain.dtype)
    end = 0
    for name, tensor in sorted(apart.items(), key=lambda item: item[1].data_ptr()):
        if tensor.numel() and tensor.data_ptr() < end:
            apart[name] = tensor.clone(memory_format=torch.contiguous_format)
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return apart


def _digest(file: Path) -> str:
    """Returns the SHA-256 of a file of any size, in hex."""
    digest, buffer = hashlib.sha256(), bytearray(2**20)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
