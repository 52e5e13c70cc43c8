"""The CUDA sources on a CPU: the text of csrc/cuda, compiled by a C++ compiler.

Three things are rewritten: launches, ``__shared__`` variables and instructions of tensor cores, which only nvcc takes;
new memory, which is filled with NaN; and the library's name and dispatch key, which become a CPU operator's.
cuda_runtime.h and threads.cpp run the kernels, libraries.cpp has the functions that csrc/cuda calls, and NVIDIA's
headers stay as they are.

The emulator cannot show speed, threads that interleave between two barriers, launches that overlap, memory that only
one of host and GPU can reach, and anything that NVIDIA's libraries do and their manuals do not say.
"""

import ctypes
import functools
import hashlib
import re
from pathlib import Path

import torch

from mpcompare.native import build, ops
from mpcompare.paths import CSRC, cache_dir

HERE = Path(__file__).parent
NVIDIA = Path(torch.__file__).parent.parent / "nvidia" / f"cu{(torch.version.cuda or '').split('.')[0]}" / "include"
REWRITES = [
    # kernel<T><<<grid, threads, shared, stream>>>(
    (r"(\w+(?:<[\w, ]+>)?)<<<(.+?)>>>\(", r"emulator::Launch(\1, {\2})("),
    # __shared__ float sums[8][32];
    (
        r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)((?:\[\w+\])*);",
        r"static emulator::Shared<\1\3> \2_memory; auto& \2 = \2_memory.value;",
    ),
    # asm("mma.sync ..." : ... ); in a function of d, a and b
    (r'asm\("(mma\.[\w.]+) .*?\);', r'emulator::mma(EMULATOR_LINE(__LINE__), "\1", d, a, b);'),
    (r"torch::stable::new_empty\(", "emulator::new_empty("),
    (r"(STABLE_TORCH_LIBRARY\w*\()mpcompare\b", r"\1mpcompare_emulated"),
    (r"(STABLE_TORCH_LIBRARY_IMPL\(\w+, )CUDA\b", r"\1CPU"),
]


def rewritten(text: str) -> str:
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text


def recipe() -> build.BuildCommand:
    """Writes the sources to the cache. Returns the recipe of one library of them all."""
    sources = [*CSRC.glob("*.?pp"), *sorted(CSRC.glob("cuda/*"))]
    texts = {path.relative_to(CSRC): rewritten(path.read_text()) for path in sources}
    units = ["memory.hpp", *(str(path) for path in texts if path.suffix in (".cpp", ".cu"))]
    texts[Path("operators.cpp")] = "".join(f'#include "{unit}"\n' for unit in units)
    own = [path for path in sorted(HERE.rglob("*")) if path.suffix in (".cpp", ".hpp", ".h")]
    key = hashlib.sha256("\0".join([*texts.values(), *(path.read_text() for path in own)]).encode()).hexdigest()[:16]
    folder = cache_dir() / "ops" / f"emulated-{key}"
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    torch_dir = Path(torch.__file__).parent
    arguments = [
        *("-std=c++17", "-O2", "-march=native", "-ffp-contract=fast"),  # a b + c is rounded once, as nvcc has it
        *("-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-DUSE_CUDA", build.ABI),
        # A trap where a vector is not aligned to its size, an index is outside its array, or an integer overflows.
        *("-fsanitize=alignment,bounds,signed-integer-overflow,shift", "-fsanitize-undefined-trap-on-error"),
        *("-I", str(HERE), "-isystem", str(torch_dir / "include"), "-isystem", str(NVIDIA)),
        *(str(folder / "operators.cpp"), str(HERE / "threads.cpp"), str(HERE / "libraries.cpp")),
        *(f"-L{torch_dir / 'lib'}", "-ltorch_cpu"),
        "-Wl,-Bsymbolic",  # calls its own functions, although torch has loaded others of the same names
    ]
    return build.BuildCommand("mpcompare_emulated", build.cpu_recipe().compiler, arguments)


@functools.cache
def load() -> ctypes.CDLL:
    """Builds and loads the operators, ``torch.ops.mpcompare_emulated``. Returns their library."""
    library = build.build(recipe())
    torch.ops.load_library(library)
    torch.library.register_fake("mpcompare_emulated::gemm")(ops._fake_gemm)
    for name in ops.WRITING:
        torch.library.register_fake(f"mpcompare_emulated::{name}")(lambda *_, **__: None)
    return ctypes.CDLL(str(library))


def switch(name: str) -> ctypes.c_int:
    """Returns a switch of emulator.hpp, which its ``value`` reads and sets."""
    return ctypes.c_int.in_dll(load(), f"emulator_{name}")
