"""The cause that the place of errors tells, on numbers that are made up: what is wrong, and where the most."""

from types import SimpleNamespace

from mpcompare.verdict.findings import GradientError, Gradients, Layer, Layers, PlaceError
from mpcompare.verdict.judge.causes import Errors, Pass, explain

PLACES = {"embedding.weight": 0, "attention.weight": 1, "down.weight": 2, "output.weight": 3, "output.bias": 3}
BF16, FP16 = 2.0**-8, 2.0**-11


def replay(wrong):
    """Returns a forced replay in which each rounding makes 1 % of each place, and errors are 1 % but at some places."""
    places = [f"{kind} {layer}" for kind in ("output", "gradient") for layer in ("attention", "output", "(output)")]
    return Layers(
        loss=1.0, exact_loss=1.0, loss_noise=0.0, gradients={}, detached=[], rounding={}, digits={},
        places={at: PlaceError(0.5 if at in wrong else 0.01, 1.0, 0.01, 100.0, 4) for at in places},
    )  # fmt: skip


def cause(excess, zeros=None, precision="bf16", wrong=None):
    """Returns the cause of gradients that are so many times beyond their limit of 0.01, and the sentence. The forced
    replay, if there is one, shows these places to be ``wrong``."""
    layers = {
        name: Layer(name.rpartition(".")[0], "Linear" if place else "Embedding", [], name.rpartition(".")[2], place)
        for name, place in PLACES.items()
    }
    u = BF16 if precision == "bf16" else FP16
    replays = {} if wrong is None else {"first": replay(wrong)}
    findings = SimpleNamespace(replays=replays, layers=layers, precision=precision, recipe=None, longest_sum=1)
    errors = {}
    for name, place in PLACES.items():
        e = 0.01 * excess.get(name, 0.5)
        slope = 1 + e / 3 * (-1) ** place  # in no one direction
        errors[name] = Errors(GradientError(e, 1.0, 1.0, slope, e, (zeros or {}).get(name, 0.0), 1000), 0.01)
    step = Pass(Gradients(1.0, 1.0, 0.0))
    return explain(SimpleNamespace(findings=findings, unit_roundoff=u, precision=precision), errors, step, step, True)


ALL = dict.fromkeys(PLACES, 3.0)


def test_errors_that_are_alike_in_all_layers_are_of_the_loss():
    assert cause(ALL)[0] == "loss"
    assert cause({**ALL, "attention.weight": 9.0})[0] == "loss"


def test_errors_that_are_much_larger_deep_inside_are_of_another_function_there():
    found, because = cause({**ALL, "attention.weight": 40.0})
    assert found == "forward pass"
    assert "(embedding.weight, attention.weight and 3 more)" in because
    assert "most of all attention.weight is off by 4.0e-01 of its norm" in because


def test_where_the_output_of_the_network_is_right_the_loss_is_wrong():
    """However much larger the errors are deep inside: what a wrong gradient makes there depends on it."""
    excess = {**ALL, "attention.weight": 40.0}
    assert cause(excess, wrong=["gradient (output)"])[0] == "loss"
    assert cause(excess, wrong=["gradient (output)", "output attention"])[0] == "forward pass"
    assert cause(excess, wrong=[])[0] == "forward pass"


def test_a_last_layer_whose_bias_is_right_has_a_wrong_input():
    found, because = cause({**ALL, "output.bias": 0.4})
    assert found == "forward pass"
    assert "their input is wrong" in because
    assert cause({**ALL, "output.bias": 0.9})[0] == "loss"  # right by little
    assert cause({**ALL, "output.weight": 0.9, "output.bias": 0.1})[0] == "input gradient"  # both are right


def test_zeros_are_underflow_unless_they_follow_from_another_function():
    zeros = {"embedding.weight": 0.7}
    assert cause(dict.fromkeys(PLACES, 1.5), zeros, "fp16")[0] == "underflow"
    huge = {**ALL, "output.weight": 90.0}
    assert cause(huge, zeros, "fp16")[0] == "forward pass"
    assert cause(huge, {**zeros, "output.weight": 0.1}, "fp16")[0] == "underflow"
    assert cause(huge, zeros, "bf16")[0] == "forward pass"  # which has fp32's range
