import math

import pytest
import torch
from conftest import make_batch, make_task

from mpcompare.errors import InputError
from mpcompare.tasks import mlp

CPU = torch.device("cpu")


def test_initial_weights_are_uniform_within_one_over_sqrt_fan_in_and_seeded():
    params = mlp.init_params((400, 900, 10), seed=3)
    assert {name: tuple(p.shape) for name, p in params.items()} == {
        "W1": (400, 900), "b1": (900,), "W2": (900, 10), "b2": (10,),
    }  # fmt: skip
    for name, fan_in in (("W1", 400), ("b1", 400), ("W2", 900)):
        bound, p = 1 / math.sqrt(fan_in), params[name]
        assert p.abs().max() <= bound
        # Variance of U(-a, a) is a^2 / 3; its sample deviation over n values is that times sqrt(0.8 / n): 5 of them.
        assert abs(p.var().item() / (bound**2 / 3) - 1) < 5 * math.sqrt(0.8 / p.numel())
    assert mlp.fingerprint(params) == mlp.fingerprint(mlp.init_params((400, 900, 10), seed=3))
    assert mlp.fingerprint(params) != mlp.fingerprint(mlp.init_params((400, 900, 10), seed=0))


def test_seed_0_is_a_seed_like_any_other():
    torch.manual_seed(123)
    first = mlp.fingerprint(mlp.init_params((4, 3), seed=0))
    torch.manual_seed(321)
    assert mlp.fingerprint(mlp.init_params((4, 3), seed=0)) == first


def test_module_is_the_same_network():
    task = make_task()
    params = mlp.init_params(task.sizes, 1)
    x, y = make_batch(task, CPU)
    module = mlp.to_module(params)
    torch.testing.assert_close(module(x), mlp.forward(params, x))
    for name, p in mlp.module_params(module).items():
        assert torch.equal(p, params[name])

    mlp.loss_fn(task.loss, module(x), y).backward()
    _, oracle = mlp.oracle(params, x, y, task.loss)
    grads = mlp.module_grads(module)
    assert list(grads) == ["W1", "b1", "W2", "b2", "W3", "b3"]
    for name, g in grads.items():
        torch.testing.assert_close(g.double(), oracle[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_oracle_gradients_are_finite_differences_of_its_loss(loss):
    task = make_task(loss=loss, hidden=[6], in_features=4, out_features=3, batch_size=5)
    params = {name: p.double() for name, p in mlp.init_params(task.sizes, 0).items()}
    x, y = make_batch(task, CPU)
    _, grads = mlp.oracle(params, x, y, loss)
    h = 1e-6
    for name, p in params.items():
        index = (0,) * p.dim()
        values = []
        for sign in (1, -1):
            moved = {**params, name: p.clone()}
            moved[name][index] += sign * h
            values.append(mlp.oracle(moved, x, y, loss)[0])
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(grads[name][index].item(), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_oracle_is_the_same_some_rows_at_a_time_and_shows_what_it_sees(loss):
    task = make_task(loss=loss, batch_size=23)
    params, (x, y) = mlp.init_params(task.sizes, 0), make_batch(task, CPU)
    whole_loss, whole = mlp.oracle(params, x, y, loss)
    seen: dict[str, list[torch.Tensor]] = {}
    value, grads = mlp.oracle(params, x, y, loss, see=lambda n, t: seen.setdefault(n, []).append(t), rows=10)
    assert value == pytest.approx(whole_loss, rel=1e-14)
    for name, g in grads.items():
        torch.testing.assert_close(g, whole[name], rtol=1e-12, atol=1e-15)
    assert list(seen) == ["z1", "dz1", "z2", "dz2", "output", "doutput"]
    doutput, z2 = torch.cat(seen["doutput"]), torch.cat(seen["z2"])
    assert doutput.shape == (23, 5)
    torch.testing.assert_close(doutput.sum(dim=0), whole["b3"])
    torch.testing.assert_close(z2.t() @ doutput, whole["W3"])
    torch.testing.assert_close(torch.cat(seen["dz2"]), doutput @ params["W3"].double().t())


def test_flops_count_every_matrix_product_of_a_step():
    n = 8192
    task = make_task(in_features=784, hidden=[8192], out_features=10, batch_size=n)
    forward, dW = 2 * n * (784 * 8192 + 8192 * 10), 2 * n * (784 * 8192 + 8192 * 10)
    assert task.flops_per_step == forward + dW + 2 * n * 8192 * 10  # only dz1: nobody needs dx


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "task.batch_size=0: expected a whole number of at least 1"),
        ({"batch_size": -8}, "task.batch_size=-8"),
        ({"batch_size": 1.5}, "task.batch_size=1.5"),
        ({"batch_size": True}, "task.batch_size=True"),
        ({"hidden": [0]}, r"task.hidden=\[0\]: expected whole numbers of at least 1"),
        ({"hidden": 512}, "task.hidden=512: expected a list of widths"),
        ({"hidden": ["a"]}, "task.hidden="),
        ({"lr": math.nan}, "task.lr=nan: expected a finite number above 0"),
        ({"lr": math.inf}, "task.lr=inf"),
        ({"lr": 0}, "task.lr=0"),
        ({"lr": "fast"}, "task.lr=fast"),
        ({"momentum": 1.0}, "task.momentum=1.0: expected a finite number above 0 and below 1"),
        ({"loss": "hinge"}, "task.loss=hinge: expected one of cross_entropy, mse"),
    ],
)
def test_bad_tasks_name_the_field_and_the_value(change, message):
    with pytest.raises(InputError, match=message):
        make_task(**change)
