"""The operators around gemm, against float64.

Bounds follow from the roundings alone: u = 2^-24 for each fp32 operation (exp and log: 2 units in the last place, 4 u),
then UNIT_ROUNDOFF of the dtype stored, or half its smallest subnormal.
"""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.operator_checks import (
    check_cross_entropy,
    check_labels_that_are_no_classes,
    check_linear,
    check_linear_backward,
    check_mse,
    check_weight_grad,
    labels,
    linear_operands,
    results_of_all,
    run_cross_entropy,
    run_mse,
)
from support.operators import CPU, DTYPE, DTYPES, UNIT_ROUNDOFF, at, randn, scalar

from mpcompare.loss_scale import DynamicLossScale, load_state
from mpcompare.native import ops
from mpcompare.native.device_scale import DeviceLossScale

pytestmark = pytest.mark.usefixtures("built", "two_threads")


# ---- linear: x w + bias


SHAPES = [(1, 1, 1), (3, 5, 7), (64, 100, 10), (65, 257, 67), (33, 600, 130)]


@DTYPE
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("wide_out", [False, True])
def test_linear_against_float64(device, dtype, relu, wide_out):
    for n, ins, outs in SHAPES:
        x, w, bias = linear_operands(n, ins, outs, dtype, device)
        out = torch.full((n, outs), math.nan, dtype=torch.float32 if wide_out else x.dtype, device=device)
        check_linear(x, w, bias, out, relu)


# Few outputs, and inputs that 8 divides: in 16 bits a GPU has a kernel of its own for them.
FEW_OUTPUTS = [(1, 8, 1), (33, 72, 10), (64, 640, 16), (31, 1032, 8), (100, 504, 9)]


@DTYPE
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("wide_out", [False, True])
def test_linear_of_few_outputs(device, dtype, relu, wide_out):
    for n, ins, outs in FEW_OUTPUTS:
        x, w, bias = linear_operands(n, ins + 8, outs + 3, dtype, device)
        x[:, ins:], w[ins:], w[:, outs:] = math.nan, math.nan, math.nan  # next to and behind the operands
        out_dtype = torch.float32 if wide_out else x.dtype
        out = torch.full((n, outs + 3), math.nan, dtype=out_dtype, device=device)
        check_linear(x[:, :ins], w[:ins, :outs], bias[:outs], out[:, :outs], relu)
        assert out[:, outs:].isnan().all()


@pytest.mark.parametrize("relu", [False, True])
def test_linear_of_few_outputs_keeps_inf_and_nan_in_their_row_and_column(device, relu):
    x, w, bias = linear_operands(40, 80, 10, "fp16", device)
    x[3, 4], x[39, 70], w[9, 7], bias[8] = math.nan, math.inf, math.nan, math.inf
    out = torch.empty(40, 10, dtype=x.dtype, device=device)
    torch.ops.mpcompare.linear(x, w, bias, out, relu=relu)
    nan = torch.zeros(40, 10, dtype=torch.bool, device=device)
    nan[3], nan[:, 7] = True, True
    expected = (x.double() @ w.double() + bias.double()).clamp(min=0 if relu else -math.inf)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out == math.inf, expected == math.inf)
    assert out.isnan()[nan].all()


@given(
    n=st.integers(1, 90), ins=st.integers(1, 300), outs=st.integers(1, 90), dtype=st.sampled_from(list(UNIT_ROUNDOFF)),
    relu=st.booleans(), pad=st.integers(1, 3),
)  # fmt: skip
def test_linear_of_rows_further_apart_writes_nothing_between_them(n, ins, outs, dtype, relu, pad):
    x, w, bias = linear_operands(n, ins + pad, outs + pad, dtype)
    out = torch.full((n, outs + pad), math.nan, dtype=x.dtype)
    check_linear(x[:, :ins], w[:ins, :outs], bias[:outs], out[:, :outs], relu)
    assert out[:, outs:].isnan().all()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("wide_out", [False, True])
def test_linear_propagates_nan(device, relu, wide_out):
    x, w, bias = linear_operands(20, 30, 40, "bf16", device)
    x[3, 4] = math.nan
    bias[7] = math.nan
    out = torch.empty(20, 40, dtype=torch.float32 if wide_out else x.dtype, device=device)
    torch.ops.mpcompare.linear(x, w, bias, out, relu=relu)
    hit = torch.zeros(20, 40, dtype=torch.bool, device=device)
    hit[3], hit[:, 7] = True, True
    assert torch.equal(out.isnan(), hit)


def test_linear_rounds_the_bias_with_the_sum(device):
    # 2049 + 2^-11 is 2050 in fp16, whose neighbours are 2 apart there. The product rounded on its own, a tie, is 1, and
    # then 2049 is a tie too and becomes 2048.
    x = torch.tensor([[1.0, 2.0**-11]], dtype=torch.float16, device=device)
    w = torch.ones(2, 1, dtype=torch.float16, device=device)
    out = torch.empty(1, 1, dtype=torch.float16, device=device)
    torch.ops.mpcompare.linear(x, w, torch.full_like(out[0], 2048.0), out)
    assert out.item() == 2050


# ---- weight_grad: z^T da


@DTYPE
def test_weight_grad_against_float64(device, dtype):
    for n, ins, outs in SHAPES:
        z, da = randn(n, ins, dtype=dtype, device=device), randn(n, outs, dtype=dtype, device=device, seed=1)
        check_weight_grad(z, da, torch.full((ins, outs), math.nan, dtype=z.dtype, device=device))


# ---- linear_backward: dw = z^T da, then da w^T where z > 0


def relu_backward(da, w, z, dbias):
    """Calls linear_backward, and drops dw."""
    torch.ops.mpcompare.linear_backward(da, w, z, torch.empty_like(w, memory_format=torch.contiguous_format), dbias)


# Few outputs take one pass on a GPU if 8 divides the inputs, or 2 in fp32, as (1000, 40, 3); the others two products.
BACKWARD_SHAPES = [
    *SHAPES, (1000, 40, 3), (70, 1030, 10), (300, 66, 16), (9, 2, 1), (257, 514, 12), (100, 64, 7), (1, 8, 1),
    (257, 520, 12), (70, 1032, 10), (17, 72, 16), (130, 128, 8),
]  # fmt: skip


@pytest.mark.slow
@DTYPE
def test_linear_backward_against_float64(device, dtype):
    for n, ins, outs in BACKWARD_SHAPES:
        w = randn(ins, outs, dtype=dtype, device=device, seed=3)
        z = randn(n, ins, dtype=dtype, device=device, seed=4).relu()
        dw, dbias = (torch.full(shape, math.nan, dtype=z.dtype, device=device) for shape in ((ins, outs), (ins,)))
        check_linear_backward(randn(n, outs, dtype=dtype, device=device, seed=5), w, z, dw, dbias)


def test_linear_backward_of_any_few_outputs(device):
    for outs in range(1, 18):
        da, w = randn(70, outs, device=device), randn(34, outs, device=device, seed=1)
        z = randn(70, 34, device=device, seed=2).relu()
        check_linear_backward(da, w, z, torch.full_like(w, math.nan), torch.empty(34, device=device))


def test_linear_backward_masks_as_torch_does(device):
    """The gradient passes where z is NaN, and stops at +0 and -0."""
    z = torch.tensor([[math.nan, 0.0, -0.0, 1.0, -1.0, math.inf]], dtype=torch.bfloat16, device=device)
    da = torch.full((1, 1), 2.0, dtype=z.dtype, device=device)
    w = torch.ones(6, 1, dtype=z.dtype, device=device)
    expected = torch.ops.aten.threshold_backward(da @ w.t(), z, 0)
    dbias = torch.empty(6, dtype=z.dtype, device=device)
    relu_backward(da, w, z, dbias)
    assert torch.equal(z, expected)
    assert z.tolist() == [[2, 0, 0, 2, 0, 2]]
    assert torch.equal(dbias, z[0])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_linear_backward_of_few_outputs_keeps_nan_in_its_place(device, dtype):
    da, w, z = (randn(*shape, dtype=dtype, device=device) for shape in ((70, 10), (72, 10), (70, 72)))
    z = z.abs() + 1
    da[69, 3], w[71, 9], z[5, 6] = math.nan, math.nan, math.nan
    dw, dbias = torch.empty_like(w), torch.empty_like(w[:, 0])
    torch.ops.mpcompare.linear_backward(da, w, z, dw, dbias)
    of_z, of_dw = torch.zeros_like(z, dtype=torch.bool), torch.zeros_like(w, dtype=torch.bool)
    of_z[69], of_z[:, 71], of_dw[6], of_dw[:, 3] = True, True, True, True
    assert torch.equal(z.isnan(), of_z)
    assert torch.equal(dw.isnan(), of_dw)
    assert dbias.isnan().all()


def test_linear_backward_does_not_let_a_masked_nan_through(device):
    z = torch.tensor([[0.0, 1.0], [1.0, 0.0]], device=device)
    da = torch.tensor([[math.nan], [math.inf]], device=device)
    dbias = torch.empty(2, device=device)
    relu_backward(da, torch.ones(2, 1, device=device), z, dbias)
    assert z.isnan().tolist() == [[False, True], [False, False]]
    assert dbias.isnan().tolist() == [False, True]
    assert dbias[0] == math.inf


@given(
    n=st.integers(1, 90), ins=st.integers(1, 90), outs=st.integers(1, 90), dtype=st.sampled_from(list(UNIT_ROUNDOFF)),
    pad=st.integers(1, 3),
)  # fmt: skip
def test_linear_backward_of_rows_further_apart(n, ins, outs, dtype, pad):
    check_linear_backward_of_rows_further_apart(n, ins, outs, dtype, pad, CPU)


@pytest.mark.slow
@DTYPE
def test_linear_backward_of_padded_rows(device, dtype):
    for n, ins, outs in BACKWARD_SHAPES:
        check_linear_backward_of_rows_further_apart(n, ins, outs, dtype, 8 - outs % 8, device)


@DTYPE
def test_products_of_matrices_that_begin_anywhere(device, dtype):
    for offset in range(9):
        x, w, bias = (at(offset, part) for part in linear_operands(20, 8, 16, dtype, device))
        out = at(offset, randn(20, 16, dtype=dtype, device=device))
        check_linear(x, w, bias, out, relu=True)
        check_weight_grad(x, out, at(offset, w))
        check_linear_backward(out, w, x, at(offset, w), at(offset, x[0]))


def check_linear_backward_of_rows_further_apart(n, ins, outs, dtype, pad, device):
    shapes = ((n, outs + pad), (ins, outs + pad), (n, ins + pad), (ins, outs + pad))
    da, w, z, dw = (randn(*shape, dtype=dtype, device=device) for shape in shapes)
    for x, columns in ((da, outs), (w, outs), (z, ins), (dw, outs)):
        x[:, columns:] = math.nan
    dbias = torch.empty(ins, dtype=z.dtype, device=device)
    check_linear_backward(da[:, :outs], w[:, :outs], z[:, :ins], dw[:, :outs], dbias)
    assert z[:, ins:].isnan().all()
    assert dw[:, outs:].isnan().all()


# ---- cross_entropy


@DTYPE
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("c", [1, 2, 10, 33, 1000, 5000])
def test_cross_entropy_against_float64(device, dtype, wide, c):
    for n in (1, 3, 67) if c >= 1000 else (1, 3, 67, 1025):
        logits = randn(n, c, dtype="fp32" if wide else dtype, device=device, seed=n, scale=3.0)
        for loss_scale in (1.0, 1024.0):
            check_cross_entropy(logits, labels(n, c, device), dtype, loss_scale)


def test_losses_of_rows_further_apart(device):
    x = torch.full((67, 20), math.nan, device=device)
    x[:, :10] = randn(67, 10, device=device, scale=3.0)
    check_cross_entropy(x[:, :10], labels(67, 10, device), "fp16", 64.0)
    check_mse(x[:, :10], randn(67, 10, device=device, seed=1), "fp16", 64.0)


def test_cross_entropy_of_more_rows_than_a_grid_holds(device):
    check_cross_entropy(randn(20_001, 3, device=device), labels(20_001, 3, device), "fp32")


@pytest.mark.slow
@given(n=st.integers(1, 300), c=st.integers(1, 70), dtype=st.sampled_from(list(UNIT_ROUNDOFF)), wide=st.booleans(),
       log_scale=st.integers(-4, 20), spread=st.floats(0, 30))  # fmt: skip
def test_cross_entropy_of_any_shape(n, c, dtype, wide, log_scale, spread):
    logits = randn(n, c, dtype="fp32" if wide else dtype, scale=spread)
    check_cross_entropy(logits, labels(n, c), dtype, 2.0**log_scale)


@DTYPE
def test_cross_entropy_of_extreme_logits_is_finite(device, dtype):
    logits = torch.tensor([[1e4, -1e4, 0], [-1e4, 1e4, 1e4], [-1e4, -1e4, -1e4], [0, -math.inf, 1]], device=device)
    for y in ([0, 1, 2, 0], [1, 0, 0, 2]):
        check_cross_entropy(logits.to(DTYPES[dtype]), torch.tensor(y, device=device), dtype)


@DTYPE
@pytest.mark.parametrize("row", [[math.inf, 0.0], [0.0, math.inf], [math.nan, 0.0], [0.0, math.nan], [-math.inf] * 2])
def test_cross_entropy_of_inf_and_nan_is_nan_in_their_row(device, dtype, row):
    logits = torch.tensor([[0.0, 1.0], row, [2.0, 0.0]], dtype=DTYPES[dtype], device=device)
    dlogits, dbias, loss = run_cross_entropy(logits, torch.tensor([0, 0, 1], device=device), dtype)
    assert loss.isnan()
    assert dlogits.isnan().all(1).tolist() == [False, True, False]
    assert dlogits[[0, 2]].isfinite().all()
    assert dbias.isnan().all()


def test_cross_entropy_of_an_impossible_label_is_inf(device):
    logits = torch.tensor([[0.0, -math.inf]], device=device)
    dlogits, _, loss = run_cross_entropy(logits, torch.tensor([1], device=device), "fp32")
    assert loss == math.inf
    assert dlogits.tolist() == [[1.0, -1.0]]


def test_loss_scale_overflows_fp16_to_inf_and_not_bf16(device):
    logits, y = torch.tensor([[0.0, 0.0], [9.0, 0.0]], device=device), torch.tensor([0, 0], device=device)
    for dtype, inf in (("fp16", True), ("bf16", False), ("fp32", False)):
        dlogits, dbias, loss = run_cross_entropy(logits, y, dtype, 2.0**19)
        assert dlogits.isinf().tolist() == [[inf, inf], [False, False]]
        assert dbias.isinf().all() == inf
        assert loss.isfinite()  # the loss itself is not scaled
    check_cross_entropy(logits, y, "fp16", 2.0**19)


@pytest.mark.parametrize("label", [-1, 3, -100, 2**40])
def test_cross_entropy_names_a_label_that_is_no_class(label):
    logits = randn(5, 3)
    y = torch.tensor([0, 1, label, 2, 0])
    dlogits, dbias, loss = torch.zeros(5, 3), torch.zeros(3), torch.zeros(())
    with pytest.raises(RuntimeError, match=f"y\\[2\\] is {label}, expected a class from 0 to 2"):
        torch.ops.mpcompare.cross_entropy(logits, y, dlogits, dbias, loss, torch.ones(()))
    assert not dlogits.any()
    assert not dbias.any()
    assert loss == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_a_label_that_is_no_class_gives_nan():
    ops.load("cuda")
    check_labels_that_are_no_classes(torch.device("cuda"))


# ---- mse


@DTYPE
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("c", [1, 2, 10, 33, 1000, 5000])
def test_mse_against_float64(device, dtype, wide, c):
    for n in (1, 3, 67) if c >= 1000 else (1, 3, 67, 1025):
        output = randn(n, c, dtype="fp32" if wide else dtype, device=device, seed=n)
        for loss_scale in (1.0, 1024.0):
            check_mse(output, randn(n, c, device=device, seed=n + 1), dtype, loss_scale)


def test_mse_of_more_elements_than_a_grid_holds(device):
    shape = (30_001, 11)
    check_mse(randn(*shape, device=device), randn(*shape, device=device, seed=1), "bf16", 64.0)


@given(n=st.integers(1, 300), c=st.integers(1, 70), dtype=st.sampled_from(list(UNIT_ROUNDOFF)), wide=st.booleans(),
       log_scale=st.integers(-4, 24))  # fmt: skip
def test_mse_of_any_shape(n, c, dtype, wide, log_scale):
    check_mse(randn(n, c, dtype="fp32" if wide else dtype), randn(n, c, seed=1), dtype, 2.0**log_scale)


@DTYPE
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_mse_propagates_inf_and_nan(device, dtype, value):
    output = randn(5, 4, dtype=dtype, device=device)
    output[2, 1] = value
    doutput, dbias, loss = run_mse(output, randn(5, 4, device=device, seed=1), dtype)
    hit = torch.zeros(5, 4, dtype=torch.bool, device=device)
    hit[2, 1] = True
    assert not loss.isfinite()
    assert torch.equal(~doutput.isfinite(), hit)
    assert torch.equal(~dbias.isfinite(), hit.any(0))


# ---- the loss scale


@DTYPE
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_finds_any_one(device, dtype, value):
    found_inf = torch.zeros((), device=device)
    for count in (1, 8, 31, 4099, 1_000_003):
        x = torch.full((count,), torch.finfo(DTYPES[dtype]).max, dtype=DTYPES[dtype], device=device)
        torch.ops.mpcompare.non_finite(x, found_inf)
        assert found_inf == 0
        for position in {0, count // 2, count - 1}:
            y = x.clone()
            y[position] = value
            torch.ops.mpcompare.non_finite(y, found_inf)
            assert found_inf == 1, position
            torch.ops.mpcompare.non_finite(x, found_inf)
            assert found_inf == 1, "it stays"
            found_inf.zero_()


@DTYPE
def test_non_finite_looks_at_nothing_else(device, dtype):
    found_inf = torch.zeros((), device=device)
    for offset in range(9):
        for count in (1, 31, 32):
            x = at(offset, randn(count, dtype=dtype, device=device))
            torch.ops.mpcompare.non_finite(x, found_inf)
            assert found_inf == 0
            x[-1] = math.inf
            torch.ops.mpcompare.non_finite(x, found_inf)
            assert found_inf == 1
            found_inf.zero_()


@given(
    init_scale=st.sampled_from([1.0, 65536.0, 3.0, 2.0**126, 2.0**-126]), growth_factor=st.floats(1.01, 1e3),
    backoff_factor=st.floats(0.01, 0.99), growth_interval=st.integers(1, 4),
    min_scale=st.sampled_from([0.0, 1e-38, 0.1, 1.0]), hysteresis=st.integers(1, 3),
    overflows=st.lists(st.booleans(), min_size=1, max_size=60),
)  # fmt: skip
def test_update_scale_is_the_policy_bit_for_bit(overflows, **rule):
    check_update_scale(CPU, overflows, **rule)


def test_update_scale_on_every_device(device):
    random = torch.Generator().manual_seed(0)
    for growth_interval, hysteresis, min_scale in ((2, 1, 0.0), (3, 2, 0.1), (1, 1, 1.0)):
        overflows = (torch.rand(300, generator=random) < 0.3).tolist()
        check_update_scale(
            device, overflows, init_scale=65536.0, growth_factor=1.7, backoff_factor=0.3,
            growth_interval=growth_interval, min_scale=min_scale, hysteresis=hysteresis,
        )  # fmt: skip


def test_a_count_beyond_the_interval_grows_no_scale_as_in_grad_scaler():
    policy = DynamicLossScale(64.0, growth_interval=2)
    on_device = DeviceLossScale(policy, CPU)
    beyond = {"growth_tracker": 2}
    load_state(policy, beyond)
    on_device.load_state(beyond)
    policy.update(False)
    on_device.update()
    tracker = torch.tensor(2, dtype=torch.int32)
    of_torch = torch._amp_update_scale_(torch.tensor(64.0), tracker, torch.tensor(0.0), 2.0, 0.5, 2)
    assert policy.scale == on_device.scale == of_torch == 64.0
    assert policy.growth_tracker == on_device.growth_tracker == tracker == 3


def check_update_scale(device, overflows, **rule):
    assume(rule["min_scale"] <= rule["init_scale"])
    policy = DynamicLossScale(**rule)
    on_device = DeviceLossScale(DynamicLossScale(**rule), device)
    for overflow in overflows:
        policy.update(overflow)
        on_device.found_inf.fill_(overflow)
        on_device.update()
        assert on_device.scale.item() == policy.scale
        assert on_device.growth_tracker.item() == policy.growth_tracker
        assert on_device.overflows_left.item() == policy.overflows_left


# ---- all


def test_results_do_not_depend_on_the_number_of_threads():
    threads, runs = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            runs.append(list(results_of_all()))
    finally:
        torch.set_num_threads(threads)
    for first, second, third in zip(*runs, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def linear_arguments(device=CPU):
    x, w, bias = linear_operands(4, 6, 8, "fp32", device)
    return [x, w, bias, torch.zeros(4, 8, device=device)]


def weight_grad_arguments(device=CPU):
    return [randn(4, 6, device=device), randn(4, 8, device=device), torch.zeros(6, 8, device=device)]


def linear_backward_arguments(device=CPU):
    return [randn(4, 8, device=device), randn(6, 8, device=device), randn(4, 6, device=device),
            torch.zeros(6, 8, device=device), torch.zeros(6, device=device)]  # fmt: skip


def loss_arguments(device=CPU):
    return [randn(4, 8, device=device), torch.zeros(4, 8, device=device), torch.zeros(8, device=device),
            torch.zeros((), device=device), torch.ones((), device=device)]  # fmt: skip


def cross_entropy_arguments(device=CPU):
    logits, *rest = loss_arguments(device)
    return [logits, labels(4, 8, device), *rest]


def mse_arguments(device=CPU):
    output, *rest = loss_arguments(device)
    return [output, randn(4, 8, device=device, seed=1), *rest]


def non_finite_arguments(device=CPU):
    return [randn(10, device=device), torch.zeros((), device=device)]


def grad_norm_arguments(device=CPU):
    scalars = [scalar(8.0, device), scalar(0.0, device), scalar(1.0, device, torch.float64)]
    return [randn(10, device=device), *scalars]


def sgd_arguments(device=CPU):
    scalars = [scalar(value, device) for value in (0.1, 8.0, 0.0, 0.5)]  # lr, loss_scale, found_inf, clip
    return [*(randn(10, device=device, seed=seed) for seed in range(4)), *scalars]


def adam_arguments(device=CPU):
    scalars = [scalar(value, device) for value in (0.1, 3.0, 8.0, 0.0, 0.5)]  # lr, step, loss_scale, found_inf, clip
    return [*(randn(10, device=device, seed=seed).abs() for seed in range(5)), *scalars]


def update_scale_arguments(device=CPU):
    return [scalar(8.0, device), *(scalar(1, device, torch.int32) for _ in range(2)), scalar(1.0, device)]


ARGUMENTS = {
    "linear": linear_arguments, "weight_grad": weight_grad_arguments, "linear_backward": linear_backward_arguments,
    "cross_entropy": cross_entropy_arguments, "mse": mse_arguments, "non_finite": non_finite_arguments,
    "grad_norm": grad_norm_arguments, "sgd": sgd_arguments, "adam": adam_arguments,
    "update_scale": update_scale_arguments,
}  # fmt: skip
OPTIONS = {
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "update_scale": {
        "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "min_scale": 0.0, "hysteresis": 1,
    },
}  # fmt: skip


def call(op, arguments, **options):
    getattr(torch.ops.mpcompare, op)(*arguments, **{**OPTIONS.get(op, {}), **options})


def test_every_operator_is_tried():
    assert tuple(ARGUMENTS) == ops.WRITING


def transposed(x):
    return x.t().contiguous().t()


@pytest.mark.parametrize(
    ("op", "position", "change", "message"),
    [
        ("linear", 0, transposed, "x has strides \\(1, 4\\); rows must be contiguous"),
        ("linear", 1, lambda w: w[:-1], "x has 6 columns, w has 5 rows"),
        ("linear", 1, lambda w: w.half(), "w must have the dtype of x"),
        ("linear", 2, lambda b: b[:-1], "bias must be a vector of 8"),
        ("linear", 2, lambda b: b.repeat_interleave(2)[::2], "bias must be contiguous"),
        ("linear", 2, lambda b: b.half(), "bias must have the dtype of x"),
        ("linear", 3, lambda out: out[:-1], "out is 3 x 8, expected 4 x 8"),
        ("linear", 3, lambda out: out.half(), "out must have the dtype of x, or fp32"),
        ("weight_grad", 0, lambda z: z[:-1], "z has 3 rows, da has 4"),
        ("weight_grad", 1, lambda da: da.half(), "da must have the dtype of z"),
        ("weight_grad", 2, lambda dw: dw[:-1], "dw is 5 x 8, expected 6 x 8"),
        ("linear_backward", 0, lambda da: da[0], "da must be a matrix, got 1 dimensions"),
        ("linear_backward", 0, lambda da: da.double(), "da must be fp32, fp16 or bf16"),
        ("linear_backward", 1, lambda w: w[:, :-1], "da has 8 columns, w has 7"),
        ("linear_backward", 2, lambda z: z[:-1], "z is 3 x 6, expected 4 x 6"),
        ("linear_backward", 2, lambda z: z.half(), "z must have the dtype of da"),
        ("linear_backward", 3, lambda dw: dw[:-1], "dw is 5 x 8, expected 6 x 8"),
        ("linear_backward", 4, lambda b: b[:-1], "dbias must be a vector of 6"),
        ("cross_entropy", 0, transposed, "logits has strides"),
        ("cross_entropy", 0, lambda x: x[:0], "logits is empty"),
        ("cross_entropy", 0, lambda x: x.half(), "logits must have the dtype of dlogits, or fp32"),
        ("cross_entropy", 1, lambda y: y.int(), "y must be int64"),
        ("cross_entropy", 1, lambda y: y[:-1], "y must be a vector of 4"),
        ("cross_entropy", 1, lambda y: y.repeat_interleave(2)[::2], "y must be contiguous"),
        ("cross_entropy", 2, lambda d: d[:, :-1].contiguous(), "dlogits is 4 x 7, expected 4 x 8"),
        ("cross_entropy", 2, lambda d: d.double(), "dlogits must be fp32, fp16 or bf16"),
        ("cross_entropy", 3, lambda b: b.half(), "dbias must have the dtype of dlogits"),
        ("cross_entropy", 4, lambda loss: loss[None], "loss must be an fp32 scalar"),
        ("cross_entropy", 4, lambda loss: loss.half(), "loss must be an fp32 scalar"),
        ("cross_entropy", 5, lambda scale: scale.double(), "loss_scale must be an fp32 scalar"),
        ("mse", 1, lambda y: y.half(), "y must be fp32"),
        ("mse", 1, lambda y: y[:-1], "y is 3 x 8, expected 4 x 8"),
        ("mse", 1, transposed, "y must be contiguous"),
        ("mse", 2, lambda d: d.half(), "dbias must have the dtype of doutput"),
        ("sgd", 0, lambda w: w.half(), "master must be fp32"),
        ("sgd", 0, lambda w: w[:0], "master is empty"),
        ("sgd", 1, lambda v: v[:-1], "velocity has 9 elements, master has 10"),
        ("sgd", 1, lambda v: v.half(), "velocity must be fp32"),
        ("sgd", 2, lambda p: p.half(), "params must have the dtype of grad"),
        ("sgd", 3, lambda g: g.double(), "grad must be fp32, fp16 or bf16"),
        ("sgd", 3, lambda g: g.repeat_interleave(2)[::2], "grad must be contiguous"),
        ("sgd", 4, lambda lr: lr[None], "lr must be an fp32 scalar"),
        ("sgd", 5, lambda scale: scale.double(), "loss_scale must be an fp32 scalar"),
        ("sgd", 6, lambda found: found.bool(), "found_inf must be an fp32 scalar"),
        ("sgd", 7, lambda clip: clip.double(), "clip must be an fp32 scalar"),
        ("adam", 0, lambda w: w.half(), "master must be fp32"),
        ("adam", 0, lambda w: w[:0], "master is empty"),
        ("adam", 1, lambda m: m.bfloat16(), "exp_avg must be fp32"),
        ("adam", 1, lambda m: m[:-1], "exp_avg has 9 elements, master has 10"),
        ("adam", 2, lambda v: v.repeat_interleave(2)[::2], "exp_avg_sq must be contiguous"),
        ("adam", 3, lambda p: p.half(), "params must have the dtype of grad"),
        ("adam", 4, lambda g: g.double(), "grad must be fp32, fp16 or bf16"),
        ("adam", 5, lambda lr: lr.double(), "lr must be an fp32 scalar"),
        ("adam", 6, lambda step: step.int(), "step must be an fp32 scalar"),
        ("adam", 7, lambda scale: scale[None], "loss_scale must be an fp32 scalar"),
        ("adam", 8, lambda found: found.bool(), "found_inf must be an fp32 scalar"),
        ("adam", 9, lambda clip: clip.double(), "clip must be an fp32 scalar"),
        ("grad_norm", 0, lambda x: x[:0], "x is empty"),
        ("grad_norm", 0, lambda x: x.double(), "x must be fp32, fp16 or bf16"),
        ("grad_norm", 0, lambda x: x.repeat_interleave(2)[::2], "x must be contiguous"),
        ("grad_norm", 1, lambda scale: scale.double(), "loss_scale must be an fp32 scalar"),
        ("grad_norm", 2, lambda found: found.bool(), "found_inf must be an fp32 scalar"),
        ("grad_norm", 3, lambda norm: norm.float(), "norm must be an fp64 scalar"),
        ("non_finite", 0, lambda x: x[:0], "x is empty"),
        ("non_finite", 0, lambda x: x.double(), "x must be fp32, fp16 or bf16"),
        ("non_finite", 0, lambda x: x.repeat_interleave(2)[::2], "x must be contiguous"),
        ("non_finite", 1, lambda found: found[None], "found_inf must be an fp32 scalar"),
        ("update_scale", 1, lambda tracker: tracker.long(), "growth_tracker must be an int32 scalar"),
        ("update_scale", 2, lambda left: left.float(), "overflows_left must be an int32 scalar"),
        ("update_scale", 3, lambda found: found.bool(), "found_inf must be an fp32 scalar"),
    ],
)  # fmt: skip
def test_what_an_operator_cannot_do_is_rejected(device, op, position, change, message):
    arguments = ARGUMENTS[op](device)
    arguments[position] = change(arguments[position])
    with pytest.raises(RuntimeError, match=f"{op}: {message}"):
        call(op, arguments)


@pytest.mark.parametrize(
    ("op", "written", "other", "message"),
    [
        ("linear", 3, 2, "out must not overlap bias"),
        ("weight_grad", 2, 0, "dw must not overlap z"),
        ("linear_backward", 4, 1, "dbias must not overlap w"),
        ("linear_backward", 4, 2, "dbias must not overlap z"),
        ("linear_backward", 3, 1, "dw must not overlap w"),
        ("cross_entropy", 2, 0, "dlogits must not overlap logits"),
        ("cross_entropy", 3, 2, "dbias must not overlap dlogits"),
        ("mse", 2, 1, "doutput must not overlap y"),
        ("sgd", 0, 3, "master must not overlap grad"),
        ("sgd", 2, 0, "params must not overlap master"),
        ("sgd", 2, 1, "params must not overlap velocity"),
        ("sgd", 0, 4, "master must not overlap lr"),
        ("adam", 1, 2, "exp_avg_sq must not overlap exp_avg"),
        ("adam", 3, 0, "params must not overlap master"),
        ("adam", 2, 6, "exp_avg_sq must not overlap step"),
        ("adam", 0, 9, "master must not overlap clip"),
        ("grad_norm", 2, 0, "found_inf must not overlap x"),
    ],
)
def test_what_is_written_may_not_overlap(device, op, written, other, message):
    arguments = ARGUMENTS[op](device)
    size = max(arguments[written].numel(), arguments[other].numel())
    shared = torch.zeros(size, dtype=arguments[other].dtype, device=device)
    for position in (written, other):
        arguments[position] = shared[: arguments[position].numel()].view(arguments[position].shape)
    with pytest.raises(RuntimeError, match=f"{op}: {message}"):
        call(op, arguments)


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("sgd", {"momentum": 0.9}, "momentum needs velocity"),
        ("sgd", {"nesterov": True}, "nesterov needs momentum"),
        ("adam", {"beta1": 1.0}, "beta1 is 1, expected 0 <= beta1 < 1"),
        ("adam", {"beta2": -0.5}, "beta2 is -0.5, expected 0 <= beta2 < 1"),
        ("adam", {"beta2": math.nan}, "beta2 is nan, expected 0 <= beta2 < 1"),
        ("adam", {"eps": -1.0}, "eps is -1, expected at least 0"),
    ],
)
def test_options_that_make_no_sense_are_rejected(device, op, options, message):
    arguments = ARGUMENTS[op](device)
    arguments[1] = None if op == "sgd" else arguments[1]
    with pytest.raises(RuntimeError, match=f"{op}: {message}"):
        call(op, arguments, **options)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("op", ARGUMENTS)
def test_arguments_on_two_devices_are_rejected(op):
    ops.load("cuda")
    arguments = ARGUMENTS[op](torch.device("cuda"))
    arguments[0] = arguments[0].cpu()
    with pytest.raises(RuntimeError, match=f"{op}: .* must be on the device of"):
        call(op, arguments)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_opcheck(device, op):
    arguments = tuple(ARGUMENTS[op](device))
    torch.library.opcheck(getattr(torch.ops.mpcompare, op).default, arguments, OPTIONS.get(op, {}))


@pytest.mark.parametrize("threads", [1, 2])
def test_column_sums_of_many_rows_keep_their_digits(threads):
    """A tile of at most 14 rows is summed in fp32, tiles in double: 14 roundings, not one for each of 100,000 rows."""
    rows, before = 100_000, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        z, dbias = torch.ones(rows, 1), torch.empty(1)
        relu_backward(torch.full((rows, 1), 0.1), torch.ones(1, 1), z, dbias)
    finally:
        torch.set_num_threads(before)
    exact = z.double().sum().item()
    assert abs(dbias.item() - exact) <= 15 * 2.0**-24 * exact
