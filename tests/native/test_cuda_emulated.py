"""The CUDA operators on a CPU, by tests/support/emulator.

The tests of test_ops.py, test_fused_ops.py and test_optimizer_ops.py run here, too. Other tests are of the parts that
CPU operators do not have: searches, captures, paths around cublasLt, and grids."""

import functools
import inspect
import math
import subprocess
from unittest import mock

import native.test_fused_ops as fused
import native.test_ops as gemms
import native.test_optimizer_ops as optimizers
import pytest
import torch
from support import emulator
from support.backends import make_backend
from support.operator_checks import (
    check_labels_that_are_no_classes,
    check_linear,
    check_linear_backward,
    check_mse,
    check_weight_grad,
    linear_operands,
    norm_of,
    results_of_all,
    sgd,
)
from support.operators import CPU, DTYPE, DTYPES, UNIT_ROUNDOFF, randn
from support.tasks import make_batch, make_task

from mpcompare.loss_scale import DynamicLossScale, NoLossScale
from mpcompare.native import build, ops

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (emulator.NVIDIA / "cublasLt.h").exists(), reason="needs the headers of a CUDA build of torch"
    ),
]
# Tests of the CPU's kernels alone, or large ones.
ELSEWHERE = {
    "test_gemm_across_every_block_boundary", "test_gemm_and_its_naive_reference_agree",
    "test_gemm_compiles_into_a_graph_by_its_fake_kernel",
    "test_subnormal_bf16_is_flushed_or_kept_but_never_anything_else",
    "test_one_openmp_runtime_serves_torch_and_the_operators", "test_results_do_not_depend_on_the_number_of_threads",
    "test_the_packing_workspace_is_counted_kept_and_given_back",
    "test_cross_entropy_names_a_label_that_is_no_class", "test_on_a_gpu_a_label_that_is_no_class_gives_nan",
    "test_tiles_pad_with_zeros_whatever_lies_next_to_the_operands", "test_tiles_and_vectors_agree",
    "test_tiles_keep_inf_and_nan_in_their_row_and_column",
    "test_tiles_give_the_same_bits_with_any_number_of_threads",
    "test_arguments_on_two_devices_are_rejected", "test_column_sums_of_many_rows_keep_their_digits",
}  # fmt: skip
for _module in (gemms, fused, optimizers):
    for _name, _test in inspect.getmembers(_module, inspect.isfunction):
        if _name.startswith("test_") and _name not in ELSEWHERE:
            globals()[f"{_name}_of_{_module.__name__}"] = _test


@pytest.fixture
def device():
    return CPU


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """Puts the emulated operators in the place of the CPU's, and the emulator's switches as they start."""
    ops.load("cpu")
    for name in ("backwards", "capturing", "unsupported", "losing_nan", "rounding_twice", "math_mode"):
        emulator.switch(name).value = 0
    emulator.switch("processors").value = 3
    monkeypatch.setattr(torch.ops, "mpcompare", torch.ops.mpcompare_emulated)


# ---- the emulator itself

KERNELS = """
#include "emulator.hpp"

#include <cstdio>

void emulator::fail(const std::string& why) { std::printf("%s\\n", why.c_str()); }

__global__ void race(int* out) {
  __shared__ int last;
  last = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) *out = last;
}
__global__ void left_by_another_block(float* out) {
  __shared__ float sum;
  if (blockIdx.x == 0) sum = 1;
  __syncthreads();
  out[blockIdx.x] = sum;
}
__global__ void warp_sums(float* out) {
  float x = threadIdx.x;
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  out[threadIdx.x] = x;
}
__global__ void some_end_early(int) {
  if (threadIdx.x == 40) return;
  __syncthreads();
}
__global__ void some_lanes(int) {
  if (threadIdx.x < 16) __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
__global__ void nothing(int) {}

int main() {
  int last[2];
  for (int i : {0, 1}) {
    emulator_backwards = i;
    race<<<1, 64, 0, emulator::STREAM>>>(&last[i]);
  }
  float sums[2], warps[64];
  emulator_backwards = 0;
  left_by_another_block<<<2, 1, 0, emulator::STREAM>>>(sums);
  warp_sums<<<1, 64, 0, emulator::STREAM>>>(warps);
  std::printf("%d %d %g %d %g %g\\n", last[0], last[1], sums[0], std::isnan(sums[1]), warps[5], warps[63]);
  some_end_early<<<1, 64, 0, emulator::STREAM>>>(0);
  some_lanes<<<1, 64, 0, emulator::STREAM>>>(0);
  nothing<<<dim3(1, 65536), 1, 0, emulator::STREAM>>>(0);
  nothing<<<1, 1, 0, nullptr>>>(0);
  warp_sums<<<1, 32, 0, emulator::STREAM>>>(warps);  // after all that
  std::printf("%g\\n", warps[5]);
}
"""


def test_the_emulator_shows_what_is_wrong_with_a_kernel(tmp_path):
    source, program = tmp_path / "kernels.cpp", tmp_path / "kernels"
    source.write_text(emulator.rewritten(KERNELS))
    command = [*build.cpu_recipe().compiler, "-std=c++17", "-U_FORTIFY_SOURCE", "-I", str(emulator.HERE)]
    files = [str(source), str(emulator.HERE / "threads.cpp"), "-o", str(program)]
    subprocess.run([*command, "-isystem", str(emulator.NVIDIA), *files], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "63 0 1 1 496 1520"
    assert [line.split(":", 1)[-1].split(": ", 1)[-1] for line in said[1:3]] == ["not every thread comes here"] * 2
    assert said[3:] == ["no such grid", "a launch on another stream than torch's", "496"]


# ---- kernels


def test_no_result_depends_on_the_order_of_blocks_and_threads():
    runs = []
    for backwards in (0, 1):
        emulator.switch("backwards").value = backwards
        runs.append([*results_of_all(), *few_outputs_results()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def few_outputs_results():
    for n, ins, outs, dtype in ((1000, 40, 3, "fp32"), (300, 1032, 10, "fp32"), (300, 1032, 10, "bf16")):
        da, w, z = (randn(*x, dtype=dtype, seed=i) for i, x in enumerate(((n, outs), (ins, outs), (n, ins))))
        dw, dbias, out = torch.empty_like(w), torch.empty_like(w[:, 0]), torch.empty_like(da)
        ops.linear(z, w, da[0], out)
        ops.linear_backward(da, w, z, dw, dbias)
        yield from (out, z, dw, dbias)


@DTYPE
@pytest.mark.parametrize("processors", [1, 132])
def test_linear_backward_on_gpus_of_any_size(device, processors, dtype):
    emulator.switch("processors").value = processors
    fused.test_linear_backward_against_float64(device, dtype)
    fused.test_linear_backward_of_padded_rows(device, dtype)


@pytest.mark.parametrize("backwards", [0, 1])
def test_loops_over_more_than_a_grid(backwards):
    emulator.switch("backwards").value = backwards
    check_mse(randn(9, 33_000), randn(9, 33_000, seed=1), "bf16")  # columns of column_sums
    w, z = randn(20_000, 16, seed=1), randn(3, 20_000, seed=2)
    check_linear_backward(randn(3, 16), w, z, torch.empty_like(w), torch.empty(20_000))
    for count in (2_000_000, 300_001):  # packs of 4 and of 1
        master, grad = randn(count), randn(count, seed=1)
        expected = master - grad
        sgd(master, None, grad, grad, lr=1.0)
        assert torch.equal(master, expected)
        assert torch.equal(grad, expected)
    ones = torch.ones(300_001, dtype=torch.bfloat16)
    for count in (300_001, 300_000):
        assert norm_of(ones[:count])[0] == count
    assert norm_of(torch.ones(2_200_000, dtype=torch.bfloat16))[0] == 2_200_000  # packs of 8


def test_a_label_that_is_no_class_gives_nan(device):
    check_labels_that_are_no_classes(device)


# ---- products


@DTYPE
@pytest.mark.parametrize("relu", [False, True])
def test_linear_by_cublas_where_cublaslt_has_no_algorithm(dtype, relu):
    emulator.switch("unsupported").value = 1
    before = torch.ops.mpcompare.lt_unsupported_products()
    for n, ins, outs in ((2, 2, 3), (37, 91, 57), (641, 3, 643)):  # the last: more elements than a grid has threads
        n += relu  # problems that are not known yet
        x, w, bias = linear_operands(n, ins, outs, dtype)
        out = torch.full((n, outs + 5), math.nan, dtype=x.dtype)
        check_linear(x, w, bias, out[:, :outs], relu)
        assert out[:, outs:].isnan().all()
    problems = 3 * (2 if relu else 1)  # with relu, then without
    assert torch.ops.mpcompare.lt_unsupported_products() == before + problems
    check_linear(x, w, bias, out[:, :outs], relu)  # known
    assert torch.ops.mpcompare.lt_unsupported_products() == before + problems


@DTYPE
def test_gradients_by_cublas_where_cublaslt_has_no_algorithm(dtype):
    emulator.switch("unsupported").value = 1
    z, da, w = (randn(*shape, dtype=dtype) for shape in ((71, 35), (71, 53), (35, 53)))
    check_weight_grad(z, da, torch.full_like(w, math.nan))
    check_linear_backward(da, w, z.relu(), torch.full_like(w, math.nan), torch.empty_like(z[0]))


def test_the_fastest_algorithm_is_searched_once_and_the_first_that_works_taken_without_a_search():
    algorithm, searches, waits = (emulator.switch(name) for name in ("algorithm", "searches", "waits"))
    x, w, bias = linear_operands(21, 22, 23, "bf16")
    out = torch.empty(21, 23, dtype=x.dtype)
    found = []
    for search in (True, True, False, False):
        before = searches.value, waits.value
        torch.ops.mpcompare.linear(x, w, bias, out, search=search)
        found.append((algorithm.value, searches.value - before[0], waits.value - before[1]))
    assert found == [(2, 1, 6), (2, 0, 0), (1, 1, 1), (1, 0, 0)]  # a probe and a timing of each wait
    assert torch.ops.mpcompare.lt_workspace_bytes() == 4096


def test_an_algorithm_is_searched_anew_wherever_it_may_depend_on_a_difference():
    searches = emulator.switch("searches")

    def matrix(rows, columns, dtype, offset=0, extra=0):
        memory = torch.zeros(8192, dtype=dtype)
        begin = -memory.data_ptr() % 512 // memory.element_size() + offset
        return memory.as_strided((rows, columns), (columns + extra, 1), begin)

    def run(dtype=torch.float32, x=None, w=None, bias=None, out=None, **choices):
        shapes = ((6, 44, x), (44, 52, w), (1, 52, bias), (6, 52, out))
        x, w, bias, out = (matrix(rows, columns, dtype, **(how or {})) for rows, columns, how in shapes)
        before = searches.value
        torch.ops.mpcompare.linear(x, w, bias[0], out, **choices)
        return searches.value - before

    changes = [
        {}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}, {"relu": True}, {"tf32": True}, {"search": False},
        *({name: {where: 1}} for name in ("x", "w", "out") for where in ("offset", "extra")), {"bias": {"offset": 1}},
    ]  # fmt: skip
    assert [run(**change) for change in changes] == [1] * len(changes)
    assert [run(**change) for change in changes] == [0] * len(changes)


@pytest.mark.parametrize("losing_nan", [1, 2])
@DTYPE
def test_an_algorithm_whose_relu_loses_nan_is_not_taken(dtype, losing_nan):
    emulator.switch("losing_nan").value = losing_nan
    x, w, bias = linear_operands(13, 14, 15 + losing_nan, dtype)
    x[3, 4] = math.nan
    out = torch.empty(13, 15 + losing_nan, dtype=x.dtype)
    ops.linear(x, w, bias, out, relu=True)
    assert torch.equal(out.isnan().any(1), x.isnan().any(1))
    assert emulator.switch("algorithm").value == (3 if losing_nan == 1 else 2)  # 2: with relu as a kernel of its own
    check_linear(x[:3], w, bias, out[:3], relu=True)


@pytest.mark.parametrize("rounding_twice", [1, 2])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_an_algorithm_that_rounds_the_product_before_it_adds_the_bias_is_not_taken(dtype, relu, rounding_twice):
    emulator.switch("rounding_twice").value = rounding_twice
    u, outs = UNIT_ROUNDOFF[dtype], 40 + rounding_twice
    x = torch.tensor([[1.0, u]] * 3, dtype=DTYPES[dtype])  # 1 + u, rounded, is 1
    w, bias = torch.ones(2, outs, dtype=x.dtype), torch.full((outs,), -1.0, dtype=x.dtype)
    out = torch.empty(3, outs, dtype=x.dtype)
    before = torch.ops.mpcompare.lt_unsupported_products()
    ops.linear(x, w, bias, out, relu=relu)
    assert (out == u).all()
    if rounding_twice == 1:
        assert emulator.switch("algorithm").value == 3  # the second fastest
    assert torch.ops.mpcompare.lt_unsupported_products() == before + (1 + relu if rounding_twice == 2 else 0)


def test_a_product_that_a_capture_meets_first_is_refused():
    x, w, bias = linear_operands(31, 32, 33, "fp32")
    out = torch.empty(31, 33)
    emulator.switch("capturing").value = 1
    with pytest.raises(RuntimeError, match="run this product once before a capture"):
        ops.linear(x, w, bias, out)
    emulator.switch("capturing").value = 0
    check_linear(x, w, bias, out, False)
    emulator.switch("capturing").value = 1
    check_linear(x, w, bias, out, False)


@pytest.mark.parametrize("unsupported", [0, 1])
def test_fp32_products_are_tf32_where_torch_allows_it_and_its_mode_stays(unsupported):
    emulator.switch("unsupported").value = unsupported
    x, w, bias = torch.full((5, 1), 1 + 2.0**-12), torch.ones(1, 6 + unsupported), torch.zeros(6 + unsupported)
    for tf32, mode, expected in ((False, 0, 1 + 2.0**-12), (True, 3, 1.0)):  # CUBLAS_TF32_TENSOR_OP_MATH
        emulator.switch("math_mode").value = mode  # the mode of torch's cuBLAS handle, which torch sets
        for product in (ops.native_gemm, functools.partial(linear, bias=bias, tf32=tf32)):
            out = torch.empty(5, 6 + unsupported)
            product(x, w, out=out)
            assert (out == expected).all()
        assert emulator.switch("math_mode").value == mode


def linear(x, w, out, **others):
    torch.ops.mpcompare.linear(x, w, out=out, **others)


def test_fp16_sums():
    ones, out = torch.ones(3, 4096, dtype=torch.float16), torch.ones(3, 3, dtype=torch.float16)
    ops.native_gemm(ones, ones, out, trans_b=True, alpha=0.5, beta=2.0, fp16_sums=True)
    assert (out == 1026).all()  # a sum stays at 2048, whose neighbours are 2 apart
    with pytest.raises(RuntimeError, match="fp16_sums needs a, b and out in fp16"):
        ops.native_gemm(ones, ones, out.float(), trans_b=True, fp16_sums=True)


# ---- a whole backend


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("precision", list(UNIT_ROUNDOFF))
def test_fused_trains_as_with_the_cpu_operators_and_its_second_step_can_be_captured(built, precision, loss):
    task = make_task(hidden=[24, 15], loss=loss, momentum=0.9)
    x, y = make_batch(task, CPU)

    def train():
        policy = DynamicLossScale(2.0**18, growth_interval=2) if precision == "fp16" else NoLossScale()
        backend = make_backend("fused", task, precision, CPU, policy)
        for step in range(8):
            emulator.switch("capturing").value = step > 0
            loss = backend.forward(x, y).item()
            backend.backward()
            backend.unscale()
            backend.clip()
            backend.step(task.optimizer.lr)
            backend.update()
            yield loss, bool(backend.skipped), backend.loss_scale().item()

    emulated = list(train())
    with mock.patch.object(torch.ops, "mpcompare", CPU_OPERATORS):
        expected = list(train())
    assert [rest for _, *rest in emulated] == [rest for _, *rest in expected]
    assert [loss for loss, *_ in emulated] == pytest.approx(
        [loss for loss, *_ in expected], rel=8 * UNIT_ROUNDOFF[precision]
    )
    assert len({skipped for _, skipped, _ in expected}) == (2 if precision == "fp16" else 1)


CPU_OPERATORS = torch.ops.mpcompare
