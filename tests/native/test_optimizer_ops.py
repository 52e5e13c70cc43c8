"""The operators that update parameters, and the norms that clip gradients: against float64 and torch's optimizers.

Bounds as in test_fused_ops.py.
"""

import math

import pytest
import torch
from support.marks import slow_after
from support.operator_checks import norm_of, sgd
from support.operators import DTYPE, DTYPES, HALF_SUBNORMAL, U, assert_within, at, randn, scalar

from mpcompare.native import ops

pytestmark = pytest.mark.usefixtures("built", "two_threads")


# ---- sgd


def fp32(x):
    return torch.tensor(x, dtype=torch.float32).item()


def check_sgd(master, velocity, params, grad, lr, momentum, loss_scale):
    """Checks sgd. v: a rounding of each product, then of the sum; master: lr times both, lr v, the sum."""
    scaled, w = fp32(1 / loss_scale) * grad.double(), master.double()
    before = 0.0 if velocity is None else fp32(momentum) * velocity.double()
    v, size = scaled + before, scaled.abs() + abs(before)
    sgd(master, velocity, params, grad, lr=lr, momentum=momentum, loss_scale=loss_scale)
    if velocity is not None:
        assert_within(velocity, v, U * size + HALF_SUBNORMAL["fp32"])
    lr = fp32(lr)
    assert_within(master, w - lr * v, 3 * U * lr * size + 3 * HALF_SUBNORMAL["fp32"])
    if params is not None:
        assert torch.equal(params, master.to(params.dtype))


@DTYPE
@pytest.mark.parametrize("with_velocity", [False, True])
@pytest.mark.parametrize("with_params", [False, True])
def test_sgd_against_float64(device, dtype, with_velocity, with_params):
    for count in (1, 7, 15, 16, 17, 63, 1000, 8192, 8193, 50_001, 300_007):
        master, velocity = randn(count, device=device), randn(count, device=device, seed=1)
        grad = randn(count, dtype=dtype, device=device, seed=2, scale=100.0)
        check_sgd(
            master, velocity if with_velocity else None, torch.empty_like(grad) if with_params else None, grad,
            lr=0.1, momentum=0.9 if with_velocity else 0.0, loss_scale=1000.0,
        )  # fmt: skip


@DTYPE
def test_sgd_is_torch_sgd(device, dtype):
    p = torch.nn.Parameter(randn(37, 3, device=device))
    master, velocity = p.detach().clone(), torch.zeros(37, 3, device=device)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    for step in range(5):
        grad = randn(37, 3, dtype=dtype, device=device, seed=step)
        p.grad = grad.float() * 0.25
        optimizer.step()
        sgd(master, velocity, None, grad, lr=0.1, momentum=0.9, loss_scale=4.0)
    torch.testing.assert_close(master, p.detach(), rtol=0, atol=5 * 5 * U * 8)  # 5 steps of 5 roundings, values below 8


def test_sgd_keeps_updates_that_16_bits_would_lose(device):
    master = torch.ones(100, device=device)
    params = torch.ones(100, dtype=torch.bfloat16, device=device)
    for _ in range(64):
        sgd(master, None, params, torch.ones_like(params), lr=2.0**-12)
    assert (master == 1 - 2.0**-6).all()
    assert (params == 1 - 2.0**-6).all()


@DTYPE
def test_sgd_propagates_inf_and_nan_and_overflows_params_to_inf(device, dtype):
    master = torch.zeros(40, device=device)
    grad = torch.zeros(40, dtype=DTYPES[dtype], device=device)
    grad[3], grad[39], grad[17] = math.nan, -math.inf, 1.0
    params = torch.empty_like(grad)
    sgd(master, None, params, grad, lr=1e6)
    assert master[3].isnan()
    assert params[3].isnan()
    assert params[39] == math.inf
    assert params[17].isinf() == (dtype == "fp16")
    assert master.isfinite().sum() == 38


@DTYPE
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_sgd_makes_params_where_the_gradient_lies(device, dtype, found_inf):
    """A skipped step makes params, too, and masters and velocity keep every bit."""
    for count in (1, 16, 1000, 50_001):
        master, velocity = randn(count, device=device), randn(count, device=device, seed=1)
        grad = randn(count, dtype=dtype, device=device, seed=2)
        grad[0] = math.inf if found_inf else grad[0]
        expected = [x.clone() for x in (master, velocity)]
        options = {"loss_scale": 8.0, "lr": 0.1, "momentum": 0.9, "found_inf": found_inf}
        if not found_inf:
            sgd(*expected, None, grad, **options)
        sgd(master, velocity, grad, grad, **options)
        assert torch.equal(master, expected[0])
        assert torch.equal(velocity, expected[1])
        assert torch.equal(grad, master.to(grad.dtype))


@DTYPE
def test_sgd_of_parameters_that_begin_anywhere(device, dtype):
    for count in (32, 35):
        w, v, g = (
            randn(count, device=device),
            randn(count, device=device, seed=1),
            randn(count, dtype=dtype, device=device),
        )
        expected = [w.clone(), v.clone()]
        sgd(*expected, None, g, lr=0.1, momentum=0.9)
        # Each may hinder the others: 4 elements are read at a time.
        for odd in range(16):
            offsets = [odd >> i & 1 for i in range(4)]
            master, velocity, params, grad = map(at, offsets, (w, v, g, g))
            sgd(master, velocity, params, grad, lr=0.1, momentum=0.9)
            assert torch.equal(master, expected[0])
            assert torch.equal(velocity, expected[1])
            assert torch.equal(params, master.to(params.dtype))


def test_sgd_divides_by_the_scale_as_gradscaler_does(device):
    """The factor is the reciprocal, rounded to fp32. It is inf for a scale that has decayed to 0, and 0 inf is NaN."""
    grad = randn(1000, device=device, scale=100.0)
    for loss_scale in (3.0, 1e-3, 65536.0):
        master = torch.zeros(1000, device=device)
        sgd(master, None, None, grad, loss_scale=loss_scale, lr=1.0)
        inv_scale = scalar(loss_scale, device).double().reciprocal().float()
        assert torch.equal(master, -(grad * inv_scale))
    grad.zero_()
    sgd(master, None, None, grad, loss_scale=0.0, lr=1.0)
    assert master.isnan().all()


# ---- step after step, compared with torch's optimizers

SIZES = [1, 7, 8191, 8193, 100_003]
ADAM = {"lr": 1e-3, "step": 1.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def adam(master, exp_avg, exp_avg_sq, params, grad, *, lr, step, loss_scale=1.0, found_inf=0.0, clip=None, **rule):
    values = (lr, step, loss_scale, found_inf, clip)
    scalars = (None if value is None else scalar(value, master.device) for value in values)
    torch.ops.mpcompare.adam(master, exp_avg, exp_avg_sq, params, grad, *scalars, **rule)


def train(start, grads, rule, *, torch_optimizer, dtype, loss_scale, clip):
    """Yields parameters and state after each step of torch's optimizer with unscaled, clipped gradients."""
    p = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = torch_optimizer([p], **rule)
    for grad in grads:
        g = grad.to(dtype) * fp32(1 / loss_scale)
        p.grad = g if clip is None else g * fp32(clip)
        optimizer.step()
        yield p.detach().clone(), {name: x.clone() for name, x in optimizer.state[p].items() if x is not None}


def unscale_error(grad, loss_scale, clip):
    """Returns the gradient that the optimizer sees, and the error of two products."""
    g = grad.double() * fp32(1 / loss_scale) * (1.0 if clip is None else fp32(clip))
    return g, 2 * U * g.abs() + 2 * HALF_SUBNORMAL["fp32"]


def check_training_by_sgd(count, dtype, device, *, lr=0.1, momentum=0.0, weight_decay=0.0, nesterov=False, clip=None):
    """Checks five steps against torch in float64. Errors of fp32, u for each product, sum and rounded constant, are
    carried from step to step. E(x) is the error of x:

    g: weight_decay E(w), and 3 u of each term    v: momentum E(v), E(g), and 3 u of each term
    d: as v     w: E(w), lr E(d), 2 u of lr d, u of w
    """
    loss_scale, lr = 1000.0, fp32(lr)
    start, grads = randn(count, device=device), [randn(count, dtype=dtype, device=device, seed=s) for s in range(1, 6)]
    rule = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    how = {"torch_optimizer": torch.optim.SGD, "loss_scale": loss_scale, "clip": clip}
    exact, single = (train(start, grads, {"lr": lr, **rule}, dtype=d, **how) for d in (torch.float64, torch.float32))
    master, velocity = start.clone(), torch.zeros_like(start) if momentum else None
    params, w, v, w_error, v_error = torch.empty_like(grads[0]), start.double(), 0.0, 0.0, 0.0
    for grad, (after, _), (torch_after, _) in zip(grads, exact, single, strict=True):
        sgd(master, velocity, params, grad, lr=lr, loss_scale=loss_scale, clip=clip, **rule)
        g, g_error = unscale_error(grad, loss_scale, clip)
        g_error = g_error + weight_decay * w_error + 3 * U * (g.abs() + weight_decay * w.abs())
        g = g + weight_decay * w
        v_error = momentum * v_error + g_error + 3 * U * (momentum * abs(v) + g.abs())
        v = momentum * v + g
        d, d_error = v, v_error
        if nesterov:
            d, d_error = g + momentum * v, g_error + momentum * v_error + 3 * U * (momentum * v.abs() + g.abs())
        w_error = w_error + lr * (d_error + 2 * U * d.abs()) + U * after.abs()
        w = after
        assert_close(master, after, w_error)
        assert_close(torch_after, after, w_error)
        if velocity is not None:
            assert_close(velocity, v, v_error)
        assert torch.equal(params, master.to(params.dtype))


def assert_close(got, exact, error):
    error = error * 1.01 + HALF_SUBNORMAL["fp32"]  # 1.01: second order terms
    off = (got.double() - exact).abs()
    assert (off <= error).all(), f"{(off / error).max():.2f} times the bound"


@DTYPE
@pytest.mark.parametrize("clip", slow_after(1, [0.3, None]))
@pytest.mark.parametrize("rule", [
    {}, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
])  # fmt: skip
def test_training_by_sgd_is_torchs(device, dtype, clip, rule):
    for count in SIZES:
        check_training_by_sgd(count, dtype, device, clip=clip, **rule)


def check_training_by_adam(
    count, dtype, device, *, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True, clip=None
):
    """Checks five steps as check_training_by_sgd does. Every form of m, v and w, torch's among them, has at most 4 u of
    each term; the denominator has the error of a root from v's errors (not to first order: v may be 0), 3 u of that
    root, u of eps and of the sum; the quotient has 3 u.
    """
    loss_scale, lr, (beta1, beta2) = 1000.0, fp32(lr), betas
    start, grads = randn(count, device=device), [randn(count, dtype=dtype, device=device, seed=s) for s in range(1, 6)]
    rule = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    how = {"torch_optimizer": optimizer, "loss_scale": loss_scale, "clip": clip}
    exact, single = (train(start, grads, rule, dtype=d, **how) for d in (torch.float64, torch.float32))
    master, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    params, w, m, v, w_error, m_error, v_error = torch.empty_like(grads[0]), start.double(), 0.0, 0.0, 0.0, 0.0, 0.0
    for step, (grad, (after, state), (torch_after, _)) in enumerate(zip(grads, exact, single, strict=True), 1):
        adam(
            master, exp_avg, exp_avg_sq, params, grad, lr=lr, step=float(step), loss_scale=loss_scale, clip=clip,
            beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled,
        )  # fmt: skip
        g, g_error = unscale_error(grad, loss_scale, clip)
        if not decoupled:
            g_error = g_error + weight_decay * w_error + 3 * U * (g.abs() + weight_decay * w.abs())
            g = g + weight_decay * w
        m_error = beta1 * m_error + (1 - beta1) * g_error + 4 * U * (beta1 * abs(m) + (1 - beta1) * g.abs())
        square_error = g_error * (2 * g.abs() + g_error)
        v_error = beta2 * v_error + (1 - beta2) * square_error + 4 * U * (beta2 * v + (1 - beta2) * g.square())
        v_error = v_error + 2 * HALF_SUBNORMAL["fp32"]
        m, v = state["exp_avg"], state["exp_avg_sq"]

        correction = (1 - beta2**step) ** 0.5
        root_error = torch.maximum((v + v_error).sqrt() - v.sqrt(), v.sqrt() - (v - v_error).clamp(min=0).sqrt())
        below = v.sqrt() / correction + eps
        below_error = (root_error + 3 * U * (v.sqrt() + root_error)) / correction + 2 * U * below
        size = lr / (1 - beta1**step)
        least = below - below_error
        update = size * m.abs() / below
        update_error = size * (m_error / least + m.abs() * below_error / (below * least)) + 3 * U * update
        keep = 1 - lr * weight_decay if decoupled else 1.0
        w_error = abs(keep) * w_error + update_error + 2 * U * (keep * w).abs() + U * after.abs()
        w = after
        assert_close(exp_avg, m, m_error)
        assert_close(exp_avg_sq, v, v_error)
        assert_close(master, after, w_error)
        assert_close(torch_after, after, w_error)
        assert torch.equal(params, master.to(params.dtype))


@DTYPE
@pytest.mark.parametrize("clip", slow_after(1, [0.3, None]))
@pytest.mark.parametrize("rule", [
    {}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": False}, {"betas": (0.5, 0.9), "eps": 1e-3},
    {"betas": (0.1, 0.0)},
])  # fmt: skip
def test_training_by_adam_is_torchs(device, dtype, clip, rule):
    for count in SIZES:
        check_training_by_adam(count, dtype, device, clip=clip, **rule)


def test_adam_of_a_late_step(device):
    """beta^t is a power in fp64, not a product of fp32; after long training it is 0."""
    w, m, v, g = (randn(1000, device=device, seed=s) for s in range(4))
    m, v = m * 0.1, v.abs()
    for step in (1.0, 2.0, 1000.0, 100_000.0, 2.0**24):
        p = torch.nn.Parameter(w.double())
        p.grad = g.double()
        optimizer = torch.optim.AdamW([p], lr=fp32(1e-3), weight_decay=0.0)
        state = {"step": torch.tensor(step - 1, dtype=torch.float64), "exp_avg": m.double(), "exp_avg_sq": v.double()}
        optimizer.state[p] = state
        optimizer.step()
        master = w.clone()
        adam(master, m.clone(), v.clone(), None, g, **{**ADAM, "step": step})
        update = (p.detach() - w.double()).abs()
        noise = 1e-3 * (m.abs() + g.abs()).double() / (v.double() * 0.999).sqrt() / (1 - 0.9**step)
        assert_close(master, p.detach(), U * p.detach().abs() + 20 * U * (update + noise))


@DTYPE
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_adam_makes_params_where_the_gradient_lies(device, dtype, found_inf):
    """A skipped step makes params, too, and masters and state keep every bit, even before the first update."""
    for count in (1, 16, 1000, 50_001):
        state = [randn(count, device=device), randn(count, device=device, seed=1), randn(count, device=device).abs()]
        grad = randn(count, dtype=dtype, device=device, seed=2)
        grad[0] = math.inf if found_inf else grad[0]
        options = {**ADAM, "step": 1.0 - found_inf, "loss_scale": 8.0, "clip": 0.5, "found_inf": found_inf}
        expected = [x.clone() for x in state]
        if not found_inf:
            adam(*expected, None, grad, **options)
            assert not torch.equal(expected[0], state[0])
        adam(*state, grad, grad, **options)
        for got, wanted in zip(state, expected, strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(grad, state[0].to(grad.dtype))


@DTYPE
def test_adam_of_parameters_that_begin_anywhere(device, dtype):
    for count in (32, 35):
        given = [randn(count, device=device), randn(count, device=device, seed=1), randn(count, device=device).abs()]
        g = randn(count, dtype=dtype, device=device)
        expected = [x.clone() for x in given]
        adam(*expected, None, g, **ADAM)
        for odd in range(32):
            master, m, v, params, grad = (at(odd >> i & 1, x) for i, x in enumerate((*given, g, g)))
            adam(master, m, v, params, grad, **ADAM)
            for got, wanted in zip((master, m, v), expected, strict=True):
                assert torch.equal(got, wanted)
            assert torch.equal(params, master.to(params.dtype))


@DTYPE
def test_adam_propagates_inf_and_nan(device, dtype):
    master, m, v = (torch.zeros(40, device=device) for _ in range(3))
    grad = torch.zeros(40, dtype=DTYPES[dtype], device=device)
    grad[3], grad[39], grad[17] = math.nan, -math.inf, 1.0
    adam(master, m, v, None, grad, **{**ADAM, "lr": 1.0})
    assert [i for i, x in enumerate(master.isnan().tolist()) if x] == [3, 39]  # inf / inf
    assert v[39] == math.inf
    assert master[17].item() == pytest.approx(-1, rel=1e-6)
    assert master.count_nonzero() == 3


@pytest.mark.parametrize("op", ["sgd", "adam"])
def test_a_clip_factor_is_a_smaller_gradient(device, op):
    """The clip factor comes before weight decay. A power of 2 gives the same bits."""

    def run(grad, **options):
        state = [randn(999, device=device, seed=1), torch.zeros(999, device=device), torch.zeros(999, device=device)]
        if op == "sgd":
            sgd(*state[:2], None, grad, lr=0.1, momentum=0.9, weight_decay=0.1, **options)
        else:
            adam(*state, None, grad, weight_decay=0.1, **ADAM, **options)
        return state

    grad = randn(999, device=device)
    for clip in (0.25, 1.0):
        pairs = zip(run(grad, clip=clip, loss_scale=8.0), run(grad * clip, loss_scale=8.0), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


# ---- norms of gradients


@DTYPE
@pytest.mark.parametrize("loss_scale", [1.0, 1000.0])
def test_grad_norm_against_float64(device, dtype, loss_scale):
    """x / loss_scale is rounded once in fp32, and each of at most n sums in fp64; a square of fp32 is exact there."""
    for count in (*SIZES, 300_007):
        xs = [randn(count, dtype=dtype, device=device, seed=s, scale=100.0) for s in range(2)]
        x = torch.cat(xs).double() * fp32(1 / loss_scale)
        error = (0 if loss_scale == 1 else U) + 2 * count * 2.0**-53
        norm, found_inf = norm_of(*xs, loss_scale=loss_scale)
        assert abs(norm.sqrt() / torch.linalg.vector_norm(x) - 1) <= 1.01 * error
        assert found_inf == 0
        norm, found_inf = norm_of(*xs, loss_scale=loss_scale, infinity=True)
        assert norm == x.abs().max().float() if loss_scale == 1 else abs(norm / x.abs().max() - 1) <= U
        assert found_inf == 0


@DTYPE
@pytest.mark.parametrize("infinity", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_grad_norm_shows_inf_and_nan_and_sets_found_inf(device, dtype, infinity, value):
    for count in (1, 31, 8193):
        x = randn(count, dtype=dtype, device=device)
        for position in {0, count // 2, count - 1}:
            y = x.clone()
            y[position] = value
            for xs in ((y, x), (x, y)):
                norm, found_inf = norm_of(*xs, infinity=infinity)
                assert found_inf == 1
                assert norm.isnan() if math.isnan(value) else norm == math.inf


@pytest.mark.parametrize("infinity", [False, True])
def test_grad_norm_keeps_nan_next_to_inf(device, infinity):
    x = torch.tensor([math.nan, math.inf], device=device)
    for xs in ((x,), (x.flip(0),), (x[:1], x[1:]), (x[1:], x[:1])):
        assert norm_of(*xs, infinity=infinity)[0].isnan()


@DTYPE
def test_grad_norm_looks_at_nothing_else(device, dtype):
    for offset in range(9):
        for count in (1, 31, 32):
            x = at(offset, randn(count, dtype=dtype, device=device))
            exact = x.double()
            assert norm_of(x)[0].item() == pytest.approx(exact.square().sum().item(), rel=count * 2.0**-52)
            assert norm_of(x, infinity=True)[0] == exact.abs().max()


def test_grad_norm_of_what_squares_of_fp32_cannot_hold(device):
    x = torch.tensor([3e30, 4e30], device=device)
    assert norm_of(x)[0].sqrt().item() == pytest.approx(5e30, rel=2 * U)
    assert norm_of(x * 1e-60)[0] == 0  # the gradients themselves are below the smallest of fp32
    x = torch.tensor([3e-30, 4e-30], device=device)
    norm, found_inf = norm_of(x, loss_scale=8.0)
    assert norm.sqrt().item() == pytest.approx(5e-30 / 8, rel=3 * U)
    assert found_inf == 0


def test_grad_norm_tells_gradients_that_overflow_by_a_small_scale_from_those_that_are_inf(device):
    """GradScaler, too, looks at gradients before it unscales them."""
    for infinity in (False, True):
        norm, found_inf = norm_of(torch.full((10,), 1e30, device=device), loss_scale=1e-10, infinity=infinity)
        assert (norm.item(), found_inf.item()) == (math.inf, 0)


@pytest.mark.parametrize("kind", [2.0, math.inf])
def test_clip_factor_is_torchs(device, kind):
    """torch's norm is fp32: n u, and 4 u of the division, the sum and the product."""
    for scale in (1e-4, 1.0, 100.0):
        p = torch.nn.Parameter(randn(1000, device=device))
        p.grad = randn(1000, device=device, seed=1, scale=scale)
        factor = torch.empty((), device=device)
        ops.clip_factor(norm_of(p.grad, infinity=kind == math.inf)[0], factor, max_norm=1.0, infinity=kind == math.inf)
        expected = p.grad * factor
        torch.nn.utils.clip_grad_norm_([p], 1.0, norm_type=kind)
        torch.testing.assert_close(p.grad, expected, rtol=1004 * U, atol=0)
        assert (factor == 1) == (scale == 1e-4)


def test_clip_factor_of_a_norm_that_is_not_finite(device):
    """The factor is as in clip_grad_norm_: NaN spoils all gradients, inf makes 0 of the finite ones."""
    for norm, expected in ((math.nan, math.nan), (math.inf, 0.0)):
        factor = torch.empty((), device=device)
        ops.clip_factor(scalar(norm, device, torch.float64), factor, max_norm=1.0)
        assert factor.isnan() if math.isnan(expected) else factor == expected
