import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mpcompare.errors import InputError
from mpcompare.native import build, ops

CPU = torch.device("cpu")


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """Returns an empty cache folder, for a process that has not built anything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ops._load_once.cache_clear()
    yield tmp_path
    ops._load_once.cache_clear()


def test_no_compiler_is_one_line_for_native_and_a_loud_fallback_for_auto(fresh_cache, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="engine=native: no C\\+\\+ compiler found .*no-such-compiler.*engine=torch"):
        ops.select_gemm("native", CPU, torch.float32)
    engine, gemm = ops.select_gemm("auto", CPU, torch.float32)
    assert (engine, gemm) == ("torch", ops.torch_gemm)
    assert "using torch" in caplog.text
    assert "no C++ compiler found" in caplog.text


def test_a_failed_build_is_explained_and_not_tried_again(fresh_cache, monkeypatch, tmp_path):
    count = tmp_path / "count"
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\necho x >> {count}\necho "gemm.cpp:1: error: no such thing" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for _ in range(3):
        with pytest.raises(build.BuildError, match="exit code 1: gemm.cpp:1: error: no such thing"):
            ops.load("cpu")
    assert count.read_text().count("x") == 2  # --version and one build
    assert not list(fresh_cache.rglob("*.so"))


def test_a_library_that_others_can_write_is_not_loaded(fresh_cache):
    folder = fresh_cache / "mpcompare" / "ops" / build.cache_key(build.cpu_recipe())
    folder.mkdir(parents=True)
    (folder / "mpcompare_cpu.so").touch()
    folder.chmod(0o777)
    with pytest.raises(
        build.BuildError, match=f"mpcompare_cpu.so is not loaded, {folder} can be written by others: de"
    ):
        build.build(build.cpu_recipe())


@pytest.mark.slow
def test_a_build_that_was_killed_does_not_block_the_next(fresh_cache):
    folder = fresh_cache / "mpcompare" / "ops" / build.cache_key(build.cpu_recipe())
    (folder / "build-killed").mkdir(parents=True)
    (folder / "build-killed" / "mpcompare_cpu.so").write_text("half a library")
    library = build.build(build.cpu_recipe())
    assert library.stat().st_size > 10_000
    assert [p.name for p in folder.iterdir() if p.suffix == ".so"] == ["mpcompare_cpu.so"]
    stamp = library.stat().st_mtime_ns
    assert build.build(build.cpu_recipe()).stat().st_mtime_ns == stamp  # cached


def test_of_two_that_need_a_library_one_builds_it(fresh_cache, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] || {{ echo x >> {tmp_path}/count; sleep 0.2; touch $3; }}\n")
    compiler.chmod(0o755)
    recipe = build.BuildCommand("x", [str(compiler)], ["-shared"])
    with ThreadPoolExecutor() as pool:
        libraries = list(pool.map(build.build, [recipe] * 4))
    assert len(set(libraries)) == 1
    assert libraries[0].exists()
    assert (tmp_path / "count").read_text().count("x") == 1


def test_the_cache_key_knows_sources_flags_and_cpu(monkeypatch, tmp_path):
    def key(flag="-O3"):
        return build.cache_key(build.BuildCommand("x", ["c++"], [flag]))

    first = key()
    assert key() == first
    assert key("-O2") != first
    monkeypatch.setattr(build, "_cpu", lambda: "another CPU")
    assert key() != first
    monkeypatch.undo()
    sources = tmp_path / "csrc"
    shutil.copytree(build.CSRC, sources)
    monkeypatch.setattr(build, "CSRC", sources)
    assert key() == first
    (sources / ".cache").mkdir()  # editors leave such things
    (sources / "gemm.cpp~").write_text("")
    assert key() == first
    with (sources / "gemm.hpp").open("a") as file:
        file.write("// changed")
    assert key() != first


def test_unknown_engine_is_named():
    with pytest.raises(InputError, match="engine=cublas: expected one of auto, native, torch"):
        ops.select_gemm("cublas", CPU, torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_cuda_sources_compile_and_link_without_a_gpu(tmp_path, monkeypatch):
    """One library holds the code for sm_80, sm_90 and sm_100."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = build.cuda_recipe("sm_90")
    others = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90, 100)]
    arguments = [argument for argument in recipe.arguments if argument != "-arch=sm_90"]
    library = build.build(replace(recipe, arguments=[*others, *arguments, "-Xlinker", "--no-undefined"]))
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    assert "cublasGemmEx" in symbols.stdout


def test_an_nvcc_of_another_cuda_is_refused(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 9.2, V9.2.1'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(build.BuildError, match=r"nvcc is of CUDA 9, torch of CUDA 13: set CUDACXX"):
        build.cuda_recipe("sm_90")


def test_no_nvcc_and_no_cuda_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    with pytest.raises(build.BuildError, match=r"no nvcc found .*no-such-nvcc.*pip install 'nvidia-cuda-nvcc==13.\*'"):
        build.cuda_recipe("sm_90")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(build.BuildError, match="a build without CUDA"):
        build.cuda_recipe("sm_90")
