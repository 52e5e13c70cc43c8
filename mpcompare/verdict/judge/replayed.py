"""A step compared with its forced replay, as numbers: the errors at its places and of its gradients.

The digits that 16 bits lose at each layer are a map of the network. It tells what stands behind a doubt in a reference,
and which layers should stay in fp32 (``report/digits_row.py``).
"""

from dataclasses import dataclass, field

from mpcompare.precision import PRECISIONS
from mpcompare.verdict.judge.drive import Gradients
from mpcompare.verdict.judge.errors import Errors, GradientError, PlaceError, RoundingErrors

OUTPUT = "(output)"  # the output of the network, above which there is the loss
WHERE = {"first": "in the first step", "sharp": "at sharp weights", "last": "after training"}
PLACES = {
    "input": "what arrives at", "output": "the output of", "gradient": "the gradient that arrives at",
    "buffer": "the buffer", "parameter": "the gradient of",
}  # fmt: skip

OPERATORS = {
    "square": "squares", "pow": "powers", "mul": "products", "div": "quotients", "add": "sums", "sub": "differences",
    "sum": "sums", "exp": "exponentials", "mm": "matrix products", "addmm": "matrix products", "bmm": "matrix products",
    "convolution": "convolutions", "rsqrt": "reciprocals of roots", "reciprocal": "reciprocals",
}  # fmt: skip


@dataclass(frozen=True)
class Digits:
    """The cost of a precision of 16 bits at one layer, or in the work before it."""

    kind: str  # the class of the layer; empty for the work before one
    output: float = 0.0  # error of its output if each operand and result is rounded once, relative to the output's norm
    # the same error for backward: of the gradients of its parameters as one vector, or of the gradients that it passes
    # down as another, the larger of the two; 0 for the work before a layer
    gradient: float = 0.0
    terms: float = 0.0  # the norm of what is summed over the norm of the output; more than 1 where terms cancel
    gradient_terms: float = 0.0  # the same for the gradient
    loss: float = 0.0  # the change of the loss if its output is rounded once, relative to the loss
    overflow: float = 0.0  # the share of its output, or of the gradient that arrives there, that is beyond the format
    underflow: float = 0.0  # the share of this gradient, with the loss scale, below the format's normal numbers
    operator: str = ""  # the first of its operators with a result beyond the format; empty where there is none
    largest: float = 0.0  # the largest number in that result, times the loss scale in backward
    in_backward: bool = False  # whether that operator is one of backward


@dataclass(frozen=True)
class Layers(Gradients):
    """A step compared with its forced replay, which goes on at each layer from what the backend had there. Gradients of
    the parameters are compared with those that follow from the recorded operands."""

    # by ``input LAYER``, ``output LAYER``, ``gradient LAYER`` and ``buffer BUFFER`` the error there; of several calls
    # the error of the call that is furthest off
    places: dict[str, PlaceError] = field(default_factory=dict)
    rounding: RoundingErrors = field(default_factory=dict)  # by gradient the error of one rounding of each result
    detached: list[str] = field(default_factory=list)  # the layers that should pass a gradient back, and do not
    # by layer, or ``before LAYER`` for the work before it, what 16 bits cost there, in the order of forward; empty in
    # other precisions
    digits: dict[str, Digits] = field(default_factory=dict)
    # for norms whose gradients are further off than roundings make, the errors compared with the gradients that torch's
    # own kernels make of the same operands, where these gradients are nearer
    of_kernels: Errors = field(default_factory=dict)
    factor: float = 1.0  # the factor of the gradient at the output of the network, without the loss scale
    # by place, as in ``places``, the format in which the place is computed, if it is the other format of 16 bits
    formats: dict[str, str] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)  # places whose numbers have 16 bits and depend on no parameter
    # by place in the network's code, the format of the numbers by which the network chooses between its layers
    choices: dict[str, str] = field(default_factory=dict)
    # whether the network was called once for each micro-batch, with its rows as they are; other rows would draw other
    # masks
    as_given: bool = True
    # the buffers that have other whole numbers than in the replay; an empty name where the network was given other ones
    # than the batch has, such as other words
    other_whole_numbers: list[str] = field(default_factory=list)
    # the buffers that calls of the network have written that are no part of the step
    aside: list[str] = field(default_factory=list)
    # whether the loss was replayed, too; it is not where nobody can tell which rows the network was called with, and
    # then the replay does not check the loss
    loss_is_replayed: bool = True


def as_place(e: GradientError, layers: Layers, tensor: str) -> PlaceError:
    """Returns the error of a parameter's gradient in the form of an error at a place of the network."""
    return PlaceError.of(e.error, e.norm, layers.rounding[tensor])


def said_of(at: str, where: str) -> str:
    """Returns a place in words, such as "the output of layer1 in the first step" for ``output layer1``."""
    kind, _, layer = at.partition(" ")
    if layer == OUTPUT:
        layer = "the network" if kind == "output" else "the output"
    layer = layer or "the network"  # a network without modules is a layer itself
    return f"{PLACES[kind]} {layer} {where}"


def percent_off(place: PlaceError) -> str:
    """Returns the relative error at a place as a percentage."""
    return percent(place.error / place.norm) if place.norm else "wholly"


def beyond(digits: Digits | None, precision: str) -> str:
    """Returns ``squares above 65504``; empty where no result is beyond the format."""
    if not digits or not digits.operator:
        return ""
    name = OPERATORS.get(digits.operator, f"results of {digits.operator}")
    return f"{name}{' in backward' if digits.in_backward else ''} above {PRECISIONS[precision].storage.maximum:g}"


def percent(share: float) -> str:
    """Returns ``12 %``, in two digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"
