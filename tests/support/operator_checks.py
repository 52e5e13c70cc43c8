"""Calls of the native operators, and their results against float64 within the bounds of rounding."""

import math

import torch
import torch.nn.functional as F
from support.operators import CPU, DTYPES, HALF_SUBNORMAL, U, assert_within, randn, scalar

from mpcompare.native import ops

NORMAL_MIN = 2.0**-126  # fp32's smallest normal number; below it a relative error says nothing


def check_column_sums(dbias, gradient):
    """Checks dbias_j = sum_i gradient_ij in any order: n - 1 roundings."""
    g = gradient.double()
    assert_within(dbias, g.sum(0), len(g) * U * g.abs().sum(0))


def linear_operands(n, ins, outs, dtype, device=CPU, seed=0):
    shapes = ((n, ins), (ins, outs), (outs,))
    return [randn(*shape, dtype=dtype, device=device, seed=seed + i) for i, shape in enumerate(shapes)]


def check_linear(x, w, bias, out, relu):
    """Checks K products and K + 1 sums: |error| <= (K + 2) u (|x| |w| + |bias|); relu makes no error larger."""
    X, W, b = x.double(), w.double(), bias.double()
    exact = X @ W + b
    torch.ops.mpcompare.linear(x, w, bias, out, relu=relu)
    error = (X.shape[1] + 2) * U * (X.abs() @ W.abs() + b.abs())
    assert_within(out, exact.clamp(min=0) if relu else exact, error)


def check_weight_grad(z, da, dw):
    """Checks a sum of n products."""
    Z, A = z.double(), da.double()
    torch.ops.mpcompare.weight_grad(z, da, dw)
    assert_within(dw, Z.t() @ A, len(Z) * U * (Z.abs().t() @ A.abs()))


def check_linear_backward(da, w, z, dw, dbias):
    """Checks dw as weight_grad, the product as linear without the bias, and dbias as the sums of the new z."""
    A, W, before = da.double(), w.double(), z.clone()
    product = A @ W.t()
    closed = before <= 0
    torch.ops.mpcompare.linear_backward(da, w, z, dw, dbias)
    Z = before.double()
    assert_within(dw, Z.t() @ A, len(Z) * U * (Z.abs().t() @ A.abs()))
    assert (z[closed] == 0).all()
    error = A.shape[1] * U * (A.abs() @ W.abs().t())
    assert_within(z, torch.where(closed, 0, product), torch.where(closed, 0, error))
    check_column_sums(dbias, z)


def further_apart(shape, dtype, device):
    """Returns a matrix of NaN whose rows have room for 3 more elements between them."""
    return torch.full((shape[0], shape[1] + 3), math.nan, dtype=dtype, device=device)[:, : shape[1]]


def run_loss(op, output, y, dtype, loss_scale=1.0):
    """Returns the gradient of ``op``, its sum over rows, and the loss. The room between rows must stay as it was."""
    doutput = further_apart(output.shape, DTYPES[dtype], output.device)
    dbias = torch.full(output.shape[1:], math.nan, dtype=DTYPES[dtype], device=output.device)
    loss = torch.full((), math.nan, device=output.device)
    op(output, y, doutput, dbias, loss, scalar(loss_scale, output.device))
    assert doutput.as_strided((len(doutput), 3), doutput.stride(), output.shape[1]).isnan().all()
    return doutput, dbias, loss


def run_cross_entropy(logits, y, dtype, loss_scale=1.0):
    return run_loss(torch.ops.mpcompare.cross_entropy, logits, y, dtype, loss_scale)


def run_mse(output, y, dtype, loss_scale=1.0):
    return run_loss(torch.ops.mpcompare.mse, output, y, dtype, loss_scale)


def check_cross_entropy(logits, y, dtype, loss_scale=1.0):
    """Checks cross_entropy against torch's float64 autograd.

    With s = logits - max, every exp(s) is off by (|s| + 4) u, their sum t by T = (sum p |s| + 4 + c) u, all relative:
    p by (|s| + 4) u + T + u; p - 1 adds u, and so do the scale and the product with it. log t is off by
    T + 4 u |log t|, its difference to s_y by u |s_y| and u of the result.
    """
    n, c = logits.shape
    x = logits.double().requires_grad_()
    exact_loss = F.cross_entropy(x, y)
    (exact_loss * loss_scale).backward()
    s = logits.double() - logits.double().amax(1, keepdim=True)
    p = s.softmax(1)
    weighted = torch.where(p > 0, p * s.abs(), 0)
    total_error = (weighted.sum(1, keepdim=True) + 4 + c) * U
    p_error = weighted * U + p * (5 * U + total_error) + NORMAL_MIN
    log_t, s_y = s.exp().sum(1).log(), s.gather(1, y[:, None])[:, 0]
    loss_error = total_error[:, 0] + U * (4 * log_t.abs() + s_y.abs() + (log_t - s_y).abs())

    dlogits, dbias, loss = run_cross_entropy(logits, y, dtype, loss_scale)
    assert_within(loss, exact_loss.detach(), loss_error.mean())
    assert_within(dlogits, x.grad, loss_scale / n * p_error + 3 * U * x.grad.abs())
    check_column_sums(dbias, dlogits)


def labels(n, c, device=CPU):
    return torch.randint(c, (n,), generator=torch.Generator().manual_seed(7)).to(device)


def check_labels_that_are_no_classes(device):
    y = torch.tensor([0, 2**40, -1, 2], device=device)
    dlogits, _, loss = run_cross_entropy(randn(4, 3, device=device), y, "fp32")
    assert loss.isnan()
    assert dlogits.isnan().all(1).tolist() == [False, True, True, False]


def check_mse(output, y, dtype, loss_scale=1.0):
    """Checks mse. output - y, the scale and their product: 3 u. A square: 3 u, and their sum n c u at most."""
    x = output.double().requires_grad_()
    exact_loss = F.mse_loss(x, y.double())
    (exact_loss * loss_scale).backward()
    doutput, dbias, loss = run_mse(output, y, dtype, loss_scale)
    assert_within(loss, exact_loss.detach(), (x.numel() + 3) * U * exact_loss.detach())
    assert_within(doutput, x.grad, 3 * U * x.grad.abs() + HALF_SUBNORMAL["fp32"])
    check_column_sums(dbias, doutput)


def results_of_all():
    """Yields what each operator writes at shapes so large that it splits its work."""
    x, w, bias = linear_operands(300, 70, 90, "bf16")
    out, z, dbias = torch.empty(300, 90, dtype=x.dtype), x.relu(), torch.empty(70, dtype=x.dtype)
    torch.ops.mpcompare.linear(x, w, bias, out)
    dw = torch.empty_like(w)
    ops.linear_backward(out, w, z, dw, dbias)
    yield from (out, z, dw, dbias)
    for n, c in ((1025, 10), (70, 5000)):
        yield from run_cross_entropy(randn(n, c), labels(n, c), "fp32")
        yield from run_mse(randn(n, c), randn(n, c, seed=1), "fp16")
    master, state, square, grad = randn(50_001), randn(50_001, seed=1), randn(50_001).abs(), randn(50_001, seed=2)
    lr, step, loss_scale, found_inf = (torch.tensor(value) for value in (0.1, 3.0, 8.0, 0.0))
    scalars, rule = (loss_scale, found_inf, None), {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    torch.ops.mpcompare.sgd(master, state, None, grad, lr, *scalars, momentum=0.9)
    torch.ops.mpcompare.adam(master, state, square, None, grad, lr, step, *scalars, **rule)
    yield from (master, state, square)
    for infinity in (False, True):
        norm = torch.zeros((), dtype=torch.float64)
        torch.ops.mpcompare.grad_norm(grad, loss_scale, found_inf, norm, infinity=infinity)
        yield norm


def sgd(master, velocity, params, grad, *, lr, **rule):
    """Calls the operator, with 1 as the loss scale, 0 as found_inf and no clip unless ``rule`` has them."""
    values = (lr, rule.pop("loss_scale", 1.0), rule.pop("found_inf", 0.0), rule.pop("clip", None))
    scalars = (None if value is None else scalar(value, master.device) for value in values)
    torch.ops.mpcompare.sgd(master, velocity, params, grad, *scalars, **rule)


def norm_of(*xs, loss_scale=1.0, infinity=False):
    """Returns norm and found_inf as grad_norm leaves them."""
    norm, found_inf = (scalar(0.0, xs[0].device, dtype) for dtype in (torch.float64, torch.float32))
    for x in xs:
        torch.ops.mpcompare.grad_norm(x, scalar(loss_scale, x.device), found_inf, norm, infinity=infinity)
    return norm, found_inf
