"""The cause that the place of errors tells, on made-up numbers: which gradients are wrong, and which the most."""

from types import SimpleNamespace

from mpcompare.verdict.judge.causes import Pass, Symptoms, TensorError, explain
from mpcompare.verdict.judge.drive import Gradients
from mpcompare.verdict.judge.errors import GradientError, Layer

PLACES = {"embedding.weight": 0, "attention.weight": 1, "down.weight": 2, "output.weight": 3, "output.bias": 3}
BF16, FP16 = 2.0**-8, 2.0**-11


def cause(excess, zeros=None, precision="bf16", replays=()):
    """Returns the cause of gradients that are ``excess`` times beyond their limit of 0.01, and the sentence."""
    layers = {
        name: Layer(name.rpartition(".")[0], "Linear" if place else "Embedding", [], name.rpartition(".")[2], place)
        for name, place in PLACES.items()
    }
    u = BF16 if precision == "bf16" else FP16
    findings = SimpleNamespace(replays=replays, layers=layers, precision=precision, recipe=None, longest_sum=1)
    errors = {}
    for name, place in PLACES.items():
        e = 0.01 * excess.get(name, 0.5)
        slope = 1 + e / 3 * (-1) ** place  # in no one direction
        errors[name] = TensorError(GradientError(e, 1.0, 1.0, slope, e, (zeros or {}).get(name, 0.0), 1000), 0.01)
    step = Pass(Gradients(1.0, 1.0, 0.0), Gradients(1.0, 1.0, 0.0))
    run = SimpleNamespace(findings=findings, unit_roundoff=u, precision=precision)
    return explain(Symptoms(run, errors, step, True))


ALL = dict.fromkeys(PLACES, 3.0)


def test_errors_that_begin_in_the_last_layer_are_of_the_loss_or_of_another_function():
    assert cause(ALL)[0] == "loss"
    found, because = cause({**ALL, "output.weight": 40.0})
    assert found == "forward pass"
    assert "(embedding.weight, attention.weight and 3 more)" in because


def test_below_a_last_layer_that_is_right_something_is_passed_down_unless_a_replay_shows_that_it_arrives():
    below = {"embedding.weight": 3.0, "attention.weight": 9.0}
    assert cause(below)[0] == cause(below, replays=("first",))[0] == "input gradient"
    assert cause({"down.weight": 3.0})[0] == "input gradient"
    assert cause({"down.weight": 3.0}, replays=("first",))[0] == "products"


def test_zeros_are_underflow_unless_they_follow_from_another_function():
    zeros = {"embedding.weight": 0.7}
    assert cause(dict.fromkeys(PLACES, 1.5), zeros, "fp16")[0] == "underflow"
    huge = {**ALL, "output.weight": 90.0}
    assert cause(huge, zeros, "fp16")[0] == "forward pass"
    assert cause(huge, {**zeros, "output.weight": 0.1}, "fp16")[0] == "underflow"
    assert cause(huge, zeros, "bf16")[0] == "forward pass"  # bf16 has fp32's range
