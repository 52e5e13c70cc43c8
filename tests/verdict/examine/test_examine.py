"""What the passes find, on backends that are right; those that are not are in test_verdict.py."""

import copy
import math

import pytest
import torch
from support.backends import BACKENDS, each_column, make_backend, step_to_gradients, take_step
from support.judging import dataset_of, examined
from support.tasks import make_batch, make_task, mlp_of

from mpcompare.contract import Stepper
from mpcompare.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mpcompare.tasks.task import params_of
from mpcompare.verdict.examine import examine
from mpcompare.verdict.examine.noise import order_is_free, train_again
from mpcompare.verdict.examine.numerics import gradient_errors
from mpcompare.verdict.examine.oracle import outputs_of
from mpcompare.verdict.reading import relative_error

CPU = torch.device("cpu")
TASK = make_task(in_features=40, samples=32 * 25)
DATA = dataset_of(TASK)


def subject_of(task, precision, batch, policy=None):
    """To ask the oracle."""
    return examine.Subject(
        lambda *_: None, task.new_model(0, CPU), policy or NoLossScale(), precision, task, lambda: iter([[batch]])
    )


@each_column
def test_a_right_backend_updates_within_fp32_and_equals_a_new_one_from_its_weights(name, precision, device):
    task = make_task(in_features=40, samples=32 * 25, momentum=0.9)
    policy = DynamicLossScale() if precision == "fp16" else NoLossScale()
    run = examined(name, BACKENDS[name], task, DATA, precision, policy=policy, steps=4, device=device.type)
    found = run.numerics
    assert found["policy"] is None
    assert [s["skipped"] for s in found["first"]["steps"]] == [False] * 3
    assert len(found["first"]["updates"]) == 3  # the second one shows the momentum
    assert all(e["excess"] <= 1 for update in found["first"]["updates"] for e in update.values())
    assert found["first"]["effective_precision"] == precision
    for e in found["last"]["gradients"].values():
        assert e["error"] <= 2**-20 * e["norm"]
    u = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}[precision]
    assert found["unit_roundoff"] == u
    assert abs(found["first"]["loss"] - found["first"]["exact_loss"]) < u


def test_the_oracle_starts_from_the_numbers_that_the_precision_has():
    """Beside it errors are a few roundings; beside unrounded weights and inputs they are several times as large."""
    batch = make_batch(TASK, CPU)
    _, grads = step_to_gradients(make_backend("scratch", TASK, "bf16", CPU), *batch)
    subject = subject_of(TASK, "bf16", batch)
    rounded, unrounded = (
        max(map(relative_error, gradient_errors(grads, examine._oracle(subject, [batch], precision).grads).values()))
        for precision in ("bf16", "fp32")
    )
    assert rounded < 2.0**-6
    assert unrounded > 2 * rounded


def test_subnormal_gradients_are_counted_at_the_loss_scale():
    batch = x, y = make_batch(TASK, CPU)
    network = TASK.new_model(0, CPU).bfloat16().double()
    with outputs_of(network) as outputs:
        loss = TASK.loss_fn(network(x.bfloat16().double()), y)
    dz = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(outputs.values()))]).abs()
    dz = dz[dz != 0]
    exact = examine._oracle(subject_of(TASK, "bf16", batch), [batch], "bf16")
    for scale in (1.0, 2.0**-6, 2.0**6):
        share = (dz * scale < 2.0**-14).double().mean().item()
        assert exact.subnormal(scale) == pytest.approx(share)
        assert 0 <= share <= 1


def test_the_noise_of_the_loss_is_what_roundings_of_the_activations_make():
    task = make_task(hidden=[64], batch_size=200)
    x, y = make_batch(task, CPU)
    exact = examine._oracle(subject_of(task, "bf16", (x, y)), [(x, y)], "bf16")
    p64 = {n: p.bfloat16().double() for n, p in mlp_of(task).by_hand(params_of(task.new_model(0, CPU))).items()}
    x64, u, losses = x.bfloat16().double(), 2.0**-8, []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)

        def noisy(z, generator=generator):
            return z * (1 + u * (2 * torch.rand(z.shape, generator=generator, dtype=z.dtype) - 1))

        z = noisy((x64 @ p64["W1"] + p64["b1"]).relu())
        losses.append(task.loss_fn(noisy(z @ p64["W2"] + p64["b2"]), y).item())
    assert torch.tensor(losses).std().item() == pytest.approx(exact.loss_noise, rel=0.2)


def test_an_overflow_is_skipped_and_what_follows_is_right():
    run = examined("scratch", BACKENDS["scratch"], TASK, DATA, "fp16", steps=3)
    steps = run.numerics["overflow"]["steps"]
    assert [s["finite"] for s in steps] == [False, True, True, True, False, True]
    assert [s["skipped"] for s in steps] == [True, False, False, False, True, False]
    assert [s["moved"] for s in steps] == [False, True, True, True, False, True]
    scale = steps[0]["loss_scale"]
    # Backs off by 2^-8, grows after two good steps, backs off after the infinite input.
    assert [s["loss_scale"] / scale for s in steps] == [1, 2**-8, 2**-8, 2**-7, 2**-7, 2**-15]
    assert run.numerics["overflow"]["next_scale"]["loss_scale"] == scale * 2**-15
    first, after = run.numerics["first"]["gradients"], run.numerics["overflow"]["gradients"]
    assert after["layer1.weight"]["error"] == pytest.approx(first["layer1.weight"]["error"], rel=0.1)


@pytest.mark.parametrize("largest", [3e-9, 0.02, 1.0, 1234.5])
def test_the_scale_that_is_too_large_is_just_too_large(largest):
    policy = examine._too_large(DynamicLossScale(), largest)
    assert 1.04 * 65504 <= policy.init_scale * largest <= 2.11 * 65504
    assert math.log2(policy.init_scale).is_integer()


def test_a_static_scale_and_one_with_a_floor_and_hysteresis_are_followed():
    for policy in (StaticLossScale(1024.0), DynamicLossScale(min_scale=1.0, hysteresis=2)):
        found = examined("scratch", BACKENDS["scratch"], TASK, DATA, "fp16", policy=policy, steps=3).numerics
        steps = found["overflow"]["steps"]
        assert all(s["loss_scale"] == s["should_scale"] and s["skipped"] == s["should_skip"] for s in steps)
        assert not steps[0]["finite"]


def test_noise_runs_are_the_same_function_and_not_the_same_roundings():
    model, batch, u = TASK.new_model(3, CPU), make_batch(TASK, CPU), 2.0**-8
    made, initial = [], params_of(model)

    def make(model, policy):
        made.append((BACKENDS["amp"](model, TASK, "bf16", policy), params_of(model)))
        return made[-1][0]

    def batches():
        while True:
            yield [batch]

    for number in range(2):
        list(train_again(make, model, NoLossScale(), TASK, "bf16", batches, 2, number, keep_scale=False))
    starts = [start for _, start in made]
    for start in starts:
        for name, p in start.items():
            change = ((p - initial[name]) / initial[name]).abs()
            assert u / 2 < change.max() <= u * (1 + 2.0**-10)  # less than it is rounded; other numbers all the same
    assert not torch.equal(starts[0]["layer1.weight"], starts[1]["layer1.weight"])
    assert order_is_free(model, TASK.loss_fn, *batch)
    weights = torch.arange(16)
    assert not order_is_free(model, lambda output, y: (output.mean(dim=1) * weights).sum(), *batch)

    run = examined("amp", BACKENDS["amp"], TASK, DATA, "fp16", steps=5, noise=2)
    again = run.numerics["noise"]
    losses = run.steps["loss"].tolist()
    assert len(again) == 2
    assert "loss scale 32768" in again[0]["change"]
    assert "loss scale 16384" in again[1]["change"]
    for other in again:
        differences = [abs(a - b) for a, b in zip(losses, other["losses"], strict=True)]
        assert 0 < max(differences) < 2.0**-10
        assert "rows in another order" in other["change"]
        assert other["skipped"] == [False] * 5
    assert examined("amp", BACKENDS["amp"], TASK, DATA, "fp16", steps=5).numerics["noise"] == []


def test_histograms_are_of_the_baseline_only_and_count_every_element():
    found = examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=2, noise=1).numerics
    for when in ("first", "last"):
        counts = found["exponents"][when]
        activations, gradients = counts["activations"], counts["gradients of activations"]
        layers = ["layer1", "relu1", "layer2", "relu2", "layer3"]
        assert list(activations) == list(gradients) == layers
        for layer, width in zip(layers, (24, 24, 16, 16, 5), strict=True):
            assert sum(activations[layer]) == sum(gradients[layer]) == 32 * width
        assert activations["relu1"][0] > 0
        assert activations["layer1"][0] == 0
        params = {name: p.numel() for name, p in params_of(TASK.new_model(0, CPU)).items()}
        for group in ("gradients of weights", "updates"):
            assert {name: sum(numbers) for name, numbers in counts[group].items()} == params
    assert examined("amp", BACKENDS["amp"], TASK, DATA, "bf16", steps=2).numerics["exponents"] == {}


def test_examining_does_not_write_to_what_it_is_given():
    model = TASK.new_model(0, CPU)
    kept, policy = copy.deepcopy(params_of(model)), DynamicLossScale()

    def make(model, policy):
        return BACKENDS["scratch"](model, TASK, "fp16", copy.deepcopy(policy))

    backend = make(model, policy)
    (x, y) = make_batch(TASK, CPU)
    rows = [{"step": 1, "loss": float(take_step(backend, x, y)), "loss_scale": 65536.0, "skipped": False}]

    def batches():
        while True:
            yield [(x, y)]

    subject = examine.Subject(make, model, policy, "fp16", TASK, batches)
    list(examine.examine(subject, Stepper(backend, TASK.new_rates()), rows, 1))
    assert all(torch.equal(kept[name], p) for name, p in params_of(model).items())
    assert policy == DynamicLossScale()


def test_the_first_wrong_loss_scale_is_found():
    rows = [
        {"step": 1, "loss_scale": 65536.0, "skipped": True},
        {"step": 2, "loss_scale": 32768.0, "skipped": False},
        {"step": 3, "loss_scale": 65536.0, "skipped": False},
    ]
    policy = DynamicLossScale(growth_interval=2)
    expected = {"step": 3, "loss_scale": 65536.0, "should_scale": 32768.0}
    assert examine._first_wrong_scale(policy, rows) == expected
    assert examine._first_wrong_scale(policy, rows[:2]) is None
    assert policy.growth_tracker == 0
