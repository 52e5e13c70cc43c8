import math
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.marks import slow_after
from support.operators import CPU, DTYPES, UNIT_ROUNDOFF

from mpcompare.native import ops

ENGINES = {"native": ops.native_gemm, "torch": ops.torch_gemm}


pytestmark = pytest.mark.usefixtures("built", "two_threads")


def operands(M, N, K, dtype, trans_a=False, trans_b=False, device=CPU, seed=0):
    random = torch.Generator().manual_seed(seed)
    a = torch.randn((K, M) if trans_a else (M, K), generator=random).to(device, DTYPES[dtype])
    b = torch.randn((N, K) if trans_b else (K, N), generator=random).to(device, DTYPES[dtype])
    c = torch.randn(M, N, generator=random).to(device)
    return a, b, c


def check(a, b, c, *, trans_a=False, trans_b=False, alpha=1.0, beta=0.0, gemm=ops.native_gemm):
    """Checks gemm's result against float64, within K + 3 fp32 roundings and then one to C's dtype.

    |C - exact| <= (K + 3) 2^-24 (|alpha| |A| |B| + |beta| |C|) + u |exact| + smallest subnormal of C   (Higham, 3.5)
    """
    A, B = (a.t() if trans_a else a).double(), (b.t() if trans_b else b).double()
    before = c.double()
    exact = alpha * (A @ B) + (beta * before if beta else 0)
    size = abs(alpha) * (A.abs() @ B.abs()) + (abs(beta) * before.abs() if beta else 0)
    gemm(a, b, c, trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta)
    u = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[c.dtype]
    bound = (A.shape[1] + 3) * 2.0**-24 * size * (1 + u) + u * exact.abs() + 2.0**-25 * (c.dtype == torch.float16)
    error = (c.double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.0, 1.0), (-0.5, 2.0)])
@pytest.mark.parametrize("wide_out", [False, True])
def test_gemm_against_float64(device, engine, dtype, trans_a, trans_b, alpha, beta, wide_out):
    for M, N, K in ((1, 1, 1), (3, 5, 7), (64, 10, 100), (65, 67, 257), (20, 130, 513)):
        a, b, c = operands(M, N, K, dtype, trans_a, trans_b, device)
        c = c if wide_out else c.to(a.dtype)
        check(a, b, c, trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta, gemm=ENGINES[engine])


@given(
    M=st.integers(1, 90), N=st.integers(1, 90), K=st.integers(1, 600), dtype=st.sampled_from(list(UNIT_ROUNDOFF)),
    trans_a=st.booleans(), trans_b=st.booleans(), alpha=st.floats(0.25, 4), beta=st.floats(-2, 2),
    pad=st.integers(0, 3),
)  # fmt: skip
def test_gemm_of_any_shape_and_row_stride(M, N, K, dtype, trans_a, trans_b, alpha, beta, pad):
    def padded(x):  # the same values as a view of a wider matrix, NaN around it
        wide = torch.full((x.shape[0], x.shape[1] + pad), math.nan, dtype=x.dtype)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]

    a, b, c = operands(M, N, K, dtype, trans_a, trans_b)
    c = padded(c.to(a.dtype))
    check(padded(a), padded(b), c, trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta)
    if pad:
        assert c.as_strided((M, pad), c.stride(), N).isnan().all()  # nothing written between the rows


@pytest.mark.slow
@given(
    M=st.integers(1, 400), N=st.sampled_from([1, 2, 9, 10, 14, 15, 33]), K=st.integers(1, 1500),
    dtype=st.sampled_from(list(UNIT_ROUNDOFF)), trans_a=st.booleans(), trans_b=st.booleans(),
)  # fmt: skip
def test_gemm_of_skinny_shapes(M, N, K, dtype, trans_a, trans_b):
    for m, n, k in ((M, N, K), (N, M, K), (M, K, N)):
        a, b, c = operands(m, n, k, dtype, trans_a, trans_b)
        check(a, b, c, trans_a=trans_a, trans_b=trans_b)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_gemm_and_its_naive_reference_agree(dtype):
    """Both are within the bound of rounding; the reference is three loops that can be read at a glance."""
    for trans_a, trans_b in ((False, False), (True, False), (False, True), (True, True)):
        a, b, c = operands(37, 29, 300, dtype, trans_a, trans_b)
        check(a, b, c.clone(), trans_a=trans_a, trans_b=trans_b, beta=0.5, gemm=torch.ops.mpcompare.gemm_reference)
        check(a, b, c, trans_a=trans_a, trans_b=trans_b, beta=0.5)


@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(1100, 1100, 700), (2000, 10, 3000), pytest.param(2000, 3000, 10, marks=pytest.mark.slow), (10, 2000, 3000)],
)
@pytest.mark.parametrize("dtype", slow_after(1, ["bf16", "fp16", "fp32"]))
def test_gemm_across_every_block_boundary(M, N, K, dtype):
    for trans_a, trans_b in ((False, False), (True, False), (False, True)):
        a, b, c = operands(M, N, K, dtype, trans_a, trans_b)
        check(a, b, c.to(a.dtype), trans_a=trans_a, trans_b=trans_b)


@pytest.mark.parametrize("engine", ENGINES)
def test_beta_0_never_reads_the_output(device, engine):
    a, b, c = operands(33, 47, 65, "fp32", device=device)
    check(a, b, c.fill_(math.nan), gemm=ENGINES[engine])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_reach_exactly_their_row_and_column(device, engine, dtype, value):
    for which in (0, 1):
        a, b, c = operands(30, 40, 50, dtype, device=device)
        (a, b)[which][7, 11] = value
        c = c.to(a.dtype)
        ENGINES[engine](a, b, c)
        hit = torch.zeros(30, 40, dtype=torch.bool, device=device)
        hit[7 if which == 0 else slice(None), slice(None) if which == 0 else 11] = True
        assert torch.equal(~c.isfinite(), hit)


@pytest.mark.parametrize("engine", ENGINES)
def test_fp16_overflow_is_inf_and_its_sums_are_fp32(device, engine):
    a = torch.full((2, 4096), 16.0, dtype=torch.float16, device=device)
    b = torch.full((4096, 2), 16.0, dtype=torch.float16, device=device)
    out = torch.empty(2, 2, dtype=torch.float16, device=device)
    ENGINES[engine](a, b, out)
    assert out.isinf().all()  # 2^20 > 65504
    wide = torch.empty(2, 2, device=device)
    ENGINES[engine](a, b, wide)
    assert (wide == 2.0**20).all()
    # 2048 + 1 + 1 + ...: an fp16 sum would stay at 2048, since its neighbours are 2 apart.
    a.fill_(1.0)
    b.fill_(1.0)
    ENGINES[engine](a, b, out)
    assert (out == 4096).all()


def test_subnormal_fp16_survives(device):
    tiny = 2.0**-24
    a = torch.full((4, 3), tiny, dtype=torch.float16, device=device)
    out = torch.empty(4, 3, dtype=torch.float16, device=device)
    ops.native_gemm(a, torch.eye(3, dtype=torch.float16, device=device), out)
    assert (out == tiny).all()


def test_subnormal_bf16_is_flushed_or_kept_but_never_anything_else():
    """x86's bf16 instruction takes subnormal inputs (below 2^-126) for 0; plain torch, the exact path, keeps them."""
    tiny = 2.0**-130
    a = torch.full((4, 4), tiny, dtype=torch.bfloat16)
    eye = torch.eye(4, dtype=torch.bfloat16)
    for gemm, accepted in ((ops.native_gemm, (0.0, tiny)), (ops.torch_gemm, (tiny,))):
        out = torch.empty(4, 4)
        gemm(a, eye, out)
        assert set(out.flatten().tolist()) <= set(accepted)


def test_result_does_not_depend_on_the_number_of_threads():
    a, b, _ = operands(300, 700, 900, "bf16")
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(torch.empty(300, 700))
            ops.native_gemm(a, b, results[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.fixture
def amx(built):
    if torch.ops.mpcompare.amx() != 1:
        pytest.skip("needs a CPU with AMX")


def around(x, value=math.nan):
    """Returns the same values as a view in the middle of a larger matrix, with ``value`` on all sides."""
    outer = torch.full((x.shape[0] + 2, x.shape[1] + 2), value, dtype=x.dtype)
    outer[1:-1, 1:-1] = x
    return outer[1:-1, 1:-1]


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("K", [1, 31, 32, 33, 63, 300, 1023, 1025, 2080])
def test_tiles_pad_with_zeros_whatever_lies_next_to_the_operands(K):
    """K, M and N end inside a tile; memory around the operands is NaN, and so is the product packed before."""
    nan = torch.full((70, 2100), math.nan, dtype=torch.bfloat16)
    for M, N in ((1, 17), (31, 33), (33, 31), (47, 65), (65, 16), (33, 1), (2, 10)):
        for trans_a, trans_b in ((False, False), (True, False), (False, True), (True, True)):
            ops.native_gemm(nan, nan, torch.empty(70, 70), trans_b=True)
            a, b, c = operands(M, N, K, "bf16", trans_a, trans_b)
            check(around(a), around(b), c, trans_a=trans_a, trans_b=trans_b)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(("row", "column"), [(0, 0), (64, 66), (31, 32), (32, 31)])
@pytest.mark.parametrize("N", [10, 67])
def test_tiles_keep_inf_and_nan_in_their_row_and_column(row, column, N):
    for which, value in ((0, math.nan), (0, math.inf), (1, math.nan), (1, -math.inf)):
        a, b, c = operands(65, N, 45, "bf16")
        (a, b)[which][(row, 44) if which == 0 else (44, column % N)] = value
        ops.native_gemm(a, b, c)
        hit = torch.zeros(65, N, dtype=torch.bool)
        hit[row if which == 0 else slice(None), slice(None) if which == 0 else column % N] = True
        assert torch.equal(~c.isfinite(), hit)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(("M", "N", "K"), [(700, 900, 2500), (1500, 10, 300), (5000, 4000, 33)])
def test_tiles_give_the_same_bits_with_any_number_of_threads(M, N, K):
    a, b, _ = operands(M, N, K, "bf16")
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(torch.empty(M, N, dtype=torch.bfloat16))
            ops.native_gemm(a, b, results[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("amx")
def test_tiles_and_vectors_agree(tmp_path):
    """Vectors run in a process with MPCOMPARE_AMX=0. Both are within K + 3 roundings of float64, so within 2 K + 6."""
    script = """
import sys, torch
from mpcompare.native import ops
ops.load("cpu")
assert torch.ops.mpcompare.amx() != 1
a, b = torch.load(sys.argv[1])
out = torch.empty(a.shape[0], b.shape[1])
ops.native_gemm(a, b, out)
torch.save(out, sys.argv[1])
"""
    a, b, tiles = operands(100, 90, 1300, "bf16")
    torch.save((a, b), tmp_path / "tensors")
    env = {**os.environ, "MPCOMPARE_AMX": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "tensors"], check=True, env=env, capture_output=True, text=True
    )
    assert "do without" in done.stderr
    vectors = torch.load(tmp_path / "tensors").double()
    ops.native_gemm(a, b, tiles)
    bound = 2 * (1300 + 3) * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((tiles.double() - vectors).abs() <= bound).all()


@pytest.mark.slow
def test_one_openmp_runtime_serves_torch_and_the_operators():
    script = "from mpcompare.native import ops; ops.load('cpu'); print(open('/proc/self/maps').read())"
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    maps = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    runtimes = set(re.findall(r"/\S*/lib\w*omp[^/\s]*", maps))
    assert len(runtimes) == 1, runtimes


def overlapping(like, which):
    """Returns a 4 x 6, b 6 x 8 and out 4 x 8 in one buffer; the last element of a, or of b, is the first of out."""
    memory = torch.zeros(24 + 48 + 32, device=like.device)
    a, b = memory[:24].view(4, 6), memory[24:72].view(6, 8)
    if which == "a":
        return a, torch.zeros_like(b), memory[23:55].view(4, 8)
    return a, b, memory[71:103].view(4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, c: (a.t().contiguous().t(), b, c), "rows must be contiguous"),
        (lambda a, b, c: (a[:, ::2], b[::2], c), "rows must be contiguous"),
        (lambda a, b, c: (a[:1].expand(4, -1), b, c), "rows must be contiguous"),
        (lambda a, b, c: (a, b[:-1], c), "op\\(a\\) is 4 x 6 but op\\(b\\) is 5 x 8"),
        (lambda a, b, c: (a, b, c[:-1]), "out is 3 x 8, expected 4 x 8"),
        (lambda a, b, c: (a.half(), b, c), "a and b must have the same dtype"),
        (lambda a, b, c: (a, b, c.half()), "out must have the dtype of a and b, or fp32"),
        (lambda a, b, c: (a.double(), b.double(), c.double()), "must be fp32, fp16 or bf16"),
        (lambda a, b, c: (a[0], b, c), "expected three matrices"),
        (lambda a, b, c: (a[:0], b, c[:0]), "empty matrix"),
        (lambda a, b, c: (c[:, :6], b, c), "must not overlap"),
        (lambda a, b, c: overlapping(a, "a"), "must not overlap"),
        (lambda a, b, c: overlapping(a, "b"), "must not overlap"),
    ],
)
def test_what_gemm_cannot_do_is_rejected(device, change, message):
    a, b, c = operands(4, 8, 6, "fp32", device=device)
    with pytest.raises(RuntimeError, match=message):
        ops.native_gemm(*change(a, b, c))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_opcheck(device, dtype):
    a, b, c = operands(4, 8, 6, dtype, device=device)
    torch.library.opcheck(torch.ops.mpcompare.gemm.default, (a, b, c), {"beta": 1.0})


def test_gemm_compiles_into_a_graph_by_its_fake_kernel():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b = torch.empty(4, 6), torch.empty(6, 8)
        ops.native_gemm(a, b, torch.empty(4, 8))
        with pytest.raises(RuntimeError, match="shapes do not match"):
            ops.native_gemm(a, b, torch.empty(4, 9))


@pytest.mark.slow
def test_the_packing_workspace_is_counted_kept_and_given_back():
    """In a new process it is 0 before a product, then the buffers of its threads; a thread that ends frees its own."""
    script = """
import threading, time, torch
from mpcompare.native import ops
ops.load("cpu")
held = torch.ops.mpcompare.workspace_bytes
counts = [held()]
a, b, out = torch.ones(300, 500), torch.ones(500, 400), torch.empty(300, 400)
def multiply():
    ops.native_gemm(a, b, out)
    counts.append(held())
multiply()
multiply()
other = threading.Thread(target=multiply)
other.start()
other.join()
deadline = time.monotonic() + 10
while held() != counts[1] and time.monotonic() < deadline:
    time.sleep(0.01)  # Python's join does not wait for the end of the C++ thread, which frees buffer by buffer
counts.append(held())
print(*counts)
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    loaded, first, again, with_another_thread, after_it = map(int, done.stdout.split())
    assert loaded == 0
    assert first >= 4 * 256 * 400  # 256 rows of b are packed at a time
    assert first % (2 << 20) == 0  # whole huge pages
    assert again == after_it == first
    assert with_another_thread == 2 * first
