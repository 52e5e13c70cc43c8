import math
import re
from functools import partial

import pytest
import torch
from support.tasks import make_batch, make_task, mlp_of
from torch import nn

from mpcompare.contract import BackendUnavailable
from mpcompare.cost import step_flops
from mpcompare.errors import InputError
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.mlp import Mlp, plain_mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task, params_of, with_values
from mpcompare.verdict.examine.layers import outputs_of
from mpcompare.verdict.examine.oracle import exact_step

CPU = torch.device("cpu")


def initial(seed=0, **shape):
    """Returns the weights of a small task."""
    return params_of(make_task(**shape).new_model(seed, CPU))


def test_initial_weights_are_uniform_within_one_over_sqrt_fan_in_and_seeded():
    shape = {"in_features": 400, "hidden": [900], "out_features": 10}
    params = initial(3, **shape)
    assert {name: tuple(p.shape) for name, p in params.items()} == {
        "layer1.weight": (900, 400), "layer1.bias": (900,), "layer2.weight": (10, 900), "layer2.bias": (10,),
    }  # fmt: skip
    for name, fan_in in (("layer1.weight", 400), ("layer1.bias", 400), ("layer2.weight", 900)):
        bound, p = 1 / math.sqrt(fan_in), params[name]
        assert p.abs().max() <= bound
        # Variance of U(-a, a) is a^2 / 3; its sample deviation over n values is that times sqrt(0.8 / n): 5 of them.
        assert abs(p.var().item() / (bound**2 / 3) - 1) < 5 * math.sqrt(0.8 / p.numel())
    assert fingerprint(params) == fingerprint(initial(3, **shape))
    assert fingerprint(params) != fingerprint(initial(0, **shape))


def test_seed_0_is_a_seed_like_any_other():
    torch.manual_seed(123)
    first = fingerprint(initial(0))
    torch.manual_seed(321)
    expected = torch.rand(1)
    torch.manual_seed(321)
    assert fingerprint(initial(0)) == first
    assert torch.equal(torch.rand(1), expected)  # a model that was made in between changes nothing


def test_by_hand_it_is_the_same_network():
    task = make_task()
    model, mlp = task.new_model(1, CPU), mlp_of(task)
    assert (mlp.layers, mlp.sizes) == (("layer1", "layer2", "layer3"), (20, 24, 16, 5))
    assert (mlp.in_features, mlp.sizes, mlp.out_features) == (20, (20, 24, 16, 5), 5)
    assert (mlp.loss, mlp.rows, mlp.accumulate, mlp.optimizer) == ("cross_entropy", 32, 1, Sgd(0.1))
    x, y = make_batch(task, CPU)
    params = mlp.by_hand(params_of(model))
    assert list(params) == ["W1", "b1", "W2", "b2", "W3", "b3"]
    z = x
    for layer in (1, 2, 3):
        z = z @ params[f"W{layer}"] + params[f"b{layer}"]
        z = z.relu() if layer < 3 else z
    torch.testing.assert_close(model(x), z)
    back = mlp.named(params)
    assert list(back) == list(params_of(model))
    for name, p in params_of(model).items():
        assert torch.equal(back[name], p)
        assert back[name].data_ptr() == p.data_ptr()  # a view
    assert list(mlp.named({"W2": params["W2"]})) == ["layer2.weight"]

    task.loss_fn(model(x), y).backward()
    exact = exact_step(model, task.loss_fn, [(x, y)], PRECISIONS["fp32"])
    assert list(exact.grads) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.double(), exact.grads[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_oracle_gradients_are_finite_differences_of_its_loss(loss):
    task = make_task(loss=loss, hidden=[6], in_features=4, out_features=3, batch_size=5)
    model, (x, y) = task.new_model(0, CPU), make_batch(task, CPU)
    grads = exact_step(model, task.loss_fn, [(x, y)], PRECISIONS["fp32"]).grads
    params, h = {name: p.double() for name, p in params_of(model).items()}, 1e-6
    for name, p in params.items():
        index = (0,) * p.dim()
        values = []
        for sign in (1, -1):
            moved = {**params, name: p.clone()}
            moved[name][index] += sign * h
            values.append(task.loss_fn(with_values(model.double(), moved, {})(x.double()), _double(y)).item())
        model.float()
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(grads[name][index].item(), rel=1e-5, abs=1e-9)


def _double(y):
    return y.double() if y.is_floating_point() else y


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_oracle_is_the_same_some_rows_at_a_time_and_counts_what_it_sees(loss, monkeypatch):
    task = make_task(loss=loss, batch_size=23)
    model, (x, y) = task.new_model(0, CPU), make_batch(task, CPU)
    whole = exact_step(model, task.loss_fn, [(x, y)], PRECISIONS["fp32"], count=True)
    assert whole.loss == pytest.approx(task.loss_fn(model(x), y).item(), rel=1e-6)
    monkeypatch.setattr("mpcompare.verdict.examine.oracle.ROWS", 10)
    parts = exact_step(model, task.loss_fn, [(x, y)], PRECISIONS["fp32"], count=True)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-14)
    assert parts.loss_noise == pytest.approx(whole.loss_noise, rel=1e-12)
    for name, g in parts.grads.items():
        torch.testing.assert_close(g, whole.grads[name], rtol=1e-12, atol=1e-15)
    layers = ["layer1", "relu1", "layer2", "relu2", "layer3"]
    assert parts.order == whole.order == layers
    assert parts.exponents["activations"] == whole.exponents["activations"]
    assert list(parts.exponents) == ["activations", "gradients of activations", "gradients of weights"]
    for group in ("activations", "gradients of activations"):
        assert [sum(parts.exponents[group][name]) for name in layers] == [23 * 24, 23 * 24, 23 * 16, 23 * 16, 23 * 5]
    assert list(parts.exponents["gradients of weights"]) == list(whole.grads)


def test_the_layers_outputs_and_gradients_make_the_weights_gradients():
    task = make_task(batch_size=23)
    model, (x, y) = task.new_model(0, CPU).double(), make_batch(task, CPU)
    with outputs_of(model) as outputs:
        loss = task.loss_fn(model(x.double()), y)
    loss.backward()
    grads = outputs.gradients
    exact = exact_step(model.float(), task.loss_fn, [(x, y)], PRECISIONS["fp32"]).grads
    assert grads["layer3"].shape == (23, 5)
    torch.testing.assert_close(grads["layer3"].sum(dim=0), exact["layer3.bias"])
    torch.testing.assert_close(grads["layer3"].t() @ outputs.tensors["relu2"], exact["layer3.weight"])
    weight = dict(model.named_parameters())["layer3.weight"]
    torch.testing.assert_close(grads["relu2"], grads["layer3"] @ weight.double())


def test_flops_count_every_matrix_product_of_a_step():
    n = 8192
    task = make_task(in_features=784, hidden=[8192], out_features=10, batch_size=n)
    forward, dW = 2 * n * (784 * 8192 + 8192 * 10), 2 * n * (784 * 8192 + 8192 * 10)
    x, y = torch.empty(n, 784), torch.zeros(n, dtype=torch.int64)
    # And only dz1: nobody needs dx.
    assert step_flops(task.new_model(0, CPU), task.loss_fn, x, y) == forward + dW + 2 * n * 8192 * 10


class OwnOptimizer:
    """Somebody else's optimizer."""

    lr = 0.1


def linear(*layers):
    return lambda: nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": linear(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))}, ", not this Sequential"),
        ({"model": linear(nn.Linear(4, 3), nn.ReLU())}, ", not this Sequential"),
        ({"model": partial(nn.Linear, 4, 2)}, ", not this Linear"),
        ({"model": linear(nn.Linear(4, 2, bias=False))}, ", and every Linear needs a bias"),
        ({"loss": nn.MSELoss()}, ", not another loss"),
        ({"optimizer": OwnOptimizer()}, " knows SGD, Adam and AdamW, not OwnOptimizer"),
    ],
)
def test_what_cannot_be_computed_by_hand_is_said(change, message):
    task = make_task(in_features=4, hidden=[3], out_features=2)
    parts = {"model": task.model, "loss": task.loss, "optimizer": task.optimizer, "batch_size": 8, **change}
    task = Task(**parts)
    model = task.new_model(0, CPU)
    only = "backend=scratch trains MLPs (Linear, ReLU, ..., Linear) with cross_entropy or mse, and SGD, Adam or AdamW"
    with pytest.raises(BackendUnavailable) as said:
        plain_mlp(model, task, "backend=scratch")
    assert str(said.value) == (only if message.startswith(",") else "backend=scratch") + message
    plain_mlp(make_task().new_model(0, CPU), make_task())


class Doubled(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input)


def hooked():
    model = nn.Sequential(nn.Linear(6, 6))
    model[0].register_forward_hook(lambda *_: None)
    return model


def replaced():
    model = nn.Sequential(nn.Linear(6, 6))
    model[0].forward = torch.relu
    return model


def frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[0].weight.requires_grad_(False)
    return model


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def with_a_frozen_extra():
    model = nn.Sequential(nn.Linear(6, 6))
    model.extra = nn.Parameter(torch.zeros(1), requires_grad=False)
    return model


def twice(layer, other=None):
    return lambda: nn.Sequential(*(layer, layer) if other is None else (layer, other, layer))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 6), shared := nn.ReLU(), nn.Linear(6, 6), shared), ", not this Sequential"),
        (twice(nn.Linear(6, 6)), ", not this Sequential"),
        (linear(nn.Linear(6, 6), nn.Flatten()), ", not this Sequential"),
        (linear(nn.Flatten(0, 1), nn.Linear(6, 6)), ", not this Sequential"),
        (nn.Sequential, ", not this Sequential"),
        (lambda: Doubled(nn.Linear(6, 6)), ", not this Doubled"),
        (hooked, ", and no layer may have hooks, or a forward that was put on it"),
        (replaced, ", and no layer may have hooks, or a forward that was put on it"),
        (twice(nn.Linear(6, 6), nn.ReLU()), ", and trains the weight and the bias of each Linear, and no other"),
        (frozen, ", and trains the weight and the bias of each Linear, and no other"),
        (tied, ", and trains the weight and the bias of each Linear, and no other"),
        (with_a_frozen_extra, ", and trains the weight and the bias of each Linear, and no other"),
    ],
)
def test_a_network_that_only_looks_like_an_mlp_is_refused(model, message):
    with pytest.raises(BackendUnavailable, match=f"SGD, Adam or AdamW{message}"):
        plain_mlp(model(), make_task())


def test_one_relu_may_stand_after_several_layers():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 3), relu, nn.Linear(3, 5), relu, nn.Linear(5, 2))
    assert plain_mlp(model, make_task()).sizes == (4, 3, 5, 2)


@pytest.mark.parametrize(
    ("loss", "flatten", "x", "y", "accepted"),
    [
        ("cross_entropy", [], [8, 6], [8], True),
        ("cross_entropy", [nn.Flatten()], [8, 2, 3], [8], True),
        ("mse", [], [8, 6], [8, 5], True),
        ("cross_entropy", [], [8, 1, 6], [8], False),
        ("cross_entropy", [], [8, 6], [8, 1], False),
        ("mse", [], [8, 6], [8], False),
    ],
)
def test_only_rows_and_their_targets_are_computed_by_hand(loss, flatten, x, y, accepted):
    mlp = plain_mlp(nn.Sequential(*flatten, nn.Linear(6, 5)), make_task(loss=loss))
    if accepted:
        assert mlp.rows_of(torch.zeros(x), torch.zeros(y)).shape == (8, 6)
        return
    wanted = re.escape(f"inputs of shape {x} and targets of shape {y}: expected [n, 6] (or a Flatten before the first")
    with pytest.raises(BackendUnavailable, match=wanted):
        mlp.rows_of(torch.zeros(x), torch.zeros(y))


def test_images_are_flattened():
    model = Mlp(784, [16], 10)
    x = torch.randn(3, 1, 28, 28)
    assert torch.equal(model(x), model(x.flatten(1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "task.batch_size=0: expected a whole number of at least 1"),
        ({"batch_size": -8}, "task.batch_size=-8"),
        ({"batch_size": 1.5}, "task.batch_size=1.5"),
        ({"batch_size": True}, "task.batch_size=True"),
        ({"hidden": [0]}, r"task.model.hidden=\[0\]: expected whole numbers of at least 1"),
        ({"hidden": 512}, "task.model.hidden=512: expected a list of widths"),
        ({"hidden": ["a"]}, "task.model.hidden="),
        ({"lr": math.nan}, "task.optimizer.lr=nan: expected a finite number above 0"),
        ({"lr": math.inf}, "task.optimizer.lr=inf"),
        ({"lr": 0}, "task.optimizer.lr=0"),
        ({"lr": "fast"}, "task.optimizer.lr=fast"),
        ({"momentum": 1.0}, "task.optimizer.momentum=1.0: expected a finite number of at least 0 and below 1"),
        ({"loss": "hinge"}, "task.loss=hinge: expected one of cross_entropy, masked_cross_entropy, mse"),
    ],
)
def test_bad_tasks_name_the_field_and_the_value(change, message):
    with pytest.raises(InputError, match=message):
        make_task(**change).new_model(0, CPU)
