"""Builds the native operators of csrc/ on first use, and keeps the libraries.

A build lands in the cache folder under a key of everything that it depends on: sources, flags, compiler, torch version
and, because of ``-march=native``, the CPU. It happens in a folder of its own and is moved into place whole, so a build
that is killed does no harm. If several processes need the same library at a time, one builds it and the others wait.
"""

import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mpcompare.foreign import check_private
from mpcompare.paths import CSRC, cache_dir

log = logging.getLogger(__name__)
# The stable ABI of torch 2.11: a library that is built with newer headers still loads there.
ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"


class BuildError(RuntimeError):
    """The native operators cannot be built or loaded; the message says why and what to do."""


@dataclass(frozen=True)
class BuildCommand:
    """A library's name and the command that builds it: ``[*compiler, *arguments, "-o", file]``."""

    name: str
    compiler: list[str]
    arguments: list[str]


def cpu_recipe() -> BuildCommand:
    """Returns the recipe of the CPU part, which holds the schemas. With g++, ``-fopenmp`` takes the OpenMP runtime that
    torch has loaded. Raises BuildError where there is no C++ compiler."""
    torch_dir = Path(torch.__file__).parent
    arguments = [
        *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", ABI),
        *("-isystem", str(torch_dir / "include")),
        *map(str, (CSRC / "ops.cpp", *sorted(CSRC.glob("cpu/*.cpp")))),
        *(f"-L{torch_dir / 'lib'}", "-ltorch_cpu"),
    ]
    return BuildCommand("mpcompare_cpu", _find("C++ compiler", "CXX", ["c++", "g++", "clang++"]), arguments)


def cuda_recipe(arch: str) -> BuildCommand:
    """Returns the recipe of the CUDA part for an ``arch`` such as ``sm_90``; no GPU is needed to compile.

    cuBLAS and the CUDA runtime come from torch's own packages, or from the toolkit where torch came without them.
    Raises BuildError where torch has no CUDA, or there is no nvcc of its major version."""
    if torch.version.cuda is None:
        raise BuildError(f"torch {torch.__version__} is a build without CUDA")
    torch_dir, major = Path(torch.__file__).parent, torch.version.cuda.split(".")[0]
    nvidia = torch_dir.parent / "nvidia" / f"cu{major}"  # pip puts the CUDA packages of torch there
    nvcc = _find(
        "nvcc", "CUDACXX", [str(nvidia / "bin" / "nvcc"), "nvcc"], f"pip install 'nvidia-cuda-nvcc=={major}.*'"
    )
    try:
        release = re.search(r"release (\d+)", _version(nvcc))
    except OSError as error:
        raise BuildError(f"cannot run {nvcc[0]}: {error}") from error
    if release and release[1] != major:
        raise BuildError(f"{nvcc[0]} is of CUDA {release[1]}, torch of CUDA {major}: set CUDACXX to a matching nvcc")
    from_pip = (nvidia / "include" / "cublas_v2.h").exists()
    arguments = [
        *("-std=c++17", "-O3", f"-arch={arch}", "--threads=0", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
        *("-DUSE_CUDA", ABI),
        *("-isystem", str(torch_dir / "include")),
        *(("-isystem", str(nvidia / "include"), f"-L{nvidia / 'lib'}") if from_pip else ()),
        *map(str, sorted(CSRC.glob("cuda/*.cu"))),
        *(f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-ltorch_cuda"),
        *(f"-l:libcublas.so.{major}", f"-l:libcublasLt.so.{major}", f"-l:libcudart.so.{major}"),
    ]
    return BuildCommand("mpcompare_cuda", nvcc, arguments)


def build(recipe: BuildCommand) -> Path:
    """Builds the library unless it is in the cache; returns its path. Raises BuildError where the compiler failed, the
    cache cannot be written, or others can write it."""
    try:
        library = _library(recipe)
        if library.exists():
            return _private(library)
        library.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _alone_in(library.parent), tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
            if library.exists():  # another process built it meanwhile
                return _private(library)
            log.info(
                "building %s, the native operators: about a minute, and once only for this machine and torch %s",
                recipe.name, torch.__version__,
            )  # fmt: skip
            unfinished = Path(folder) / library.name
            command = [*recipe.compiler, *recipe.arguments, "-o", str(unfinished)]
            code, said = _run(command)
            if code != 0:
                log.debug("%s\n%s", " ".join(command), said)
                raise BuildError(f"{recipe.compiler[0]} failed with exit code {code}: {_reason(said)}")
            unfinished.replace(library)
    except OSError as error:
        raise BuildError(f"cannot run {recipe.compiler[0]} or write to {cache_dir()}: {error}") from error
    return _private(library)


def is_built(recipe: BuildCommand) -> bool:
    """Returns whether the library is in the cache."""
    return _library(recipe).exists()


def _library(recipe: BuildCommand) -> Path:
    return cache_dir() / "ops" / cache_key(recipe) / f"{recipe.name}.so"


def _private(library: Path) -> Path:
    """Returns the library; raises BuildError if somebody else can write it: to load a library runs its code."""
    try:
        check_private(library)
    except ValueError as error:
        advice = f"delete {library.parent}, and take the right from others, or name another folder with XDG_CACHE_HOME"
        raise BuildError(f"{library.name} is not loaded, {error}: {advice}") from error
    return library


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process holds ``folder``, then holds it. The lock of a process that is killed ends, too."""
    with (folder / "lock").open("w") as file:
        with suppress(OSError):  # a file system without locks: each builds for itself
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> tuple[int, str]:
    """Returns exit code and stderr. On Ctrl-C the compiler ends too, and the programs that it has started."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


def cache_key(recipe: BuildCommand) -> str:
    """Returns a hash of everything that the library depends on."""
    parts = [*recipe.compiler, _version(recipe.compiler), *recipe.arguments, torch.__version__, sys.platform, _cpu()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".hpp", ".cu")):
        digest.update(f"\0{source.relative_to(CSRC)}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _find(what: str, variable: str, names: list[str], hint: str = "install one") -> list[str]:
    """Returns the command that the environment's ``variable`` names, with its arguments (``ccache g++``), or else the
    first of ``names`` that is installed. Raises BuildError where there is none; ``what`` and ``hint`` are part of the
    message."""
    chosen = os.environ.get(variable, "").split()
    for words in [chosen] if chosen else [[name] for name in names]:
        if path := shutil.which(words[0]):
            return [path, *words[1:]]
    looked_for = " ".join(chosen) or ", ".join(names)
    raise BuildError(f"no {what} found (looked for {looked_for}): {hint}, or set {variable}")


def _version(compiler: list[str]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _reason(stderr: str) -> str:
    """Returns the first line of ``stderr`` that names an error."""
    lines = stderr.splitlines()
    full = [line for line in lines if "No space left" in line]  # the linker's own error says nothing of a full disk
    telling = [line for line in lines if re.search(r"error|cannot find|undefined", line)]
    return (full or telling or lines or ["no output"])[0]


def _cpu() -> str:
    """Returns the description of the CPU on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(next((line for line in lines if line.startswith(key)), "") for key in ("flags", "Features", "model"))
