"""The findings of an examination, which are ``numerics.json``: what each check found, as its file in judge/ says.

The examination makes them (examine/), and the checks, which read them, do not know it: findings of a race, of a test,
or of anyone else's loop are judged alike. Nothing here needs torch.

Every number is of a tensor, and tensors are named as ``model.named_parameters()`` names them. A dict in which a tensor
is missing says nothing of it; None in its place says that the backend showed none.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import cattrs

from mpcompare.promises import Promises
from mpcompare.verdict.judge.aged import Aged
from mpcompare.verdict.judge.buffers import Buffers
from mpcompare.verdict.judge.drive import Drive, Gradients
from mpcompare.verdict.judge.errors import Errors, Layer, RoundingErrors
from mpcompare.verdict.judge.held_out import HeldOut
from mpcompare.verdict.judge.kinds import ORDER, file_of
from mpcompare.verdict.judge.loss_scale import WrongScale
from mpcompare.verdict.judge.masks import Masks
from mpcompare.verdict.judge.moves import Moves
from mpcompare.verdict.judge.replayed import Layers
from mpcompare.verdict.judge.resume import Reload
from mpcompare.verdict.judge.run import NoiseRun
from mpcompare.verdict.judge.trained import TrainedUpdate

LOWEST, HIGHEST = -60, 20  # exponents that are told apart: fp16 ends at -24 and 15


@dataclass(frozen=True)
class Recipe:
    """The settings of the task that decide how its numbers are read."""

    batch_size: int  # rows of a step
    accumulate: int = 1  # micro-batches of a step
    clip_norm: float | None = None  # None where nothing is clipped
    clip_norm_type: float = 2.0  # the order of that norm
    linear: bool = True  # whether an update is linear in the gradients
    bounded: bool = True  # whether an update has a bound
    # whether the loss is a function of the user's own, or of the network: it may compute in any format
    own_loss: bool = False


Counts = dict[str, dict[str, list[int]]]  # by group (activations, ...) and tensor or layer: numbers by their exponent


@dataclass(frozen=True)
class Findings:
    """Everything that examining one backend found.

    A field has the name of the check whose file describes it. It is None where there was nothing to look at.
    """

    precision: str  # in which the backend was asked to compute
    recipe: Recipe  # the part of the task that decides how numbers are read
    longest_sum: int  # about how many numbers are summed at most
    layers: dict[str, Layer]  # the owner of each parameter and buffer
    first: Drive  # from the initial weights
    last: Gradients  # the step after training, compared with a new backend with the same weights
    # for gradients and buffers of the first step the error that one rounding of each result of the whole network makes;
    # empty where a forced replay sees each layer by itself
    rounding: RoundingErrors = field(default_factory=dict)
    overflow: Drive | None = None  # with a loss scale that is too large; None without loss scaling
    # a step with an infinite input; None with loss scaling, where it is one of the pass ``overflow``
    infinite: Drive | None = None
    aged: Aged | None = None
    trained: TrainedUpdate | None = None
    midway: Drive | None = None
    # steps compared with their forced replays, by name: ``first``, ``sharp`` (at weights at which nothing is nearly
    # linear), ``last`` (the step after training); empty where the backend does not show its layers
    replays: dict[str, Layers] = field(default_factory=dict)
    resume: Reload | None = None
    masks: Masks | None = None
    loss_scale: WrongScale | None = None
    # the change of each parameter over training, as a sketch
    moved: dict[str, list[float]] = field(default_factory=dict)
    buffers: Buffers = field(default_factory=dict)  # the buffers that training moved, as training left them
    # the buffers after the step that follows, compared with the buffers of a new backend that takes this step, too
    last_buffers: Errors = field(default_factory=dict)
    held_out: HeldOut | None = None
    moves: Moves | None = None
    noise: list[NoiseRun] = field(default_factory=list)  # training again; empty where the noise was not measured
    # numbers by their exponents, of the first step and after training (``first``, ``last``); empty where they were not
    # counted
    exponents: dict[str, Counts] = field(default_factory=dict)
    # ``network``, ``batch`` and ``torch``, as far as the backend changed them; None where nobody looked
    lent: list[str] | None = None
    promises: Promises = field(default_factory=Promises)  # the differences from ``amp`` that the backend declares
    # by check, what the pass of its own found, an instance of the class of the check's name
    of_checks: dict[str, Any] = field(default_factory=dict)
    # by name of a pass, the error that stopped it, in a line; the findings of such a pass are empty
    stopped: dict[str, str] = field(default_factory=dict)
    # by name of a pass, why its step cannot be replayed layer by layer, though the backend shows its layers
    hidden: dict[str, str] = field(default_factory=dict)

    @property
    def drives(self) -> dict[str, Drive]:
        """By name the passes in which a new backend was driven from the initial state."""
        others = {"overflow": self.overflow, "infinite input": self.infinite}
        return {"first": self.first, **{name: drive for name, drive in others.items() if drive}}


_converter = cattrs.Converter(omit_if_default=True, detailed_validation=False)


def to_document(findings: Findings) -> dict[str, Any]:
    """Returns the findings as plain values, which JSON can hold, except for inf and NaN."""
    document = _converter.unstructure(findings)
    of_checks = document.pop("of_checks", {})
    return document | of_checks


def from_document(document: dict[str, Any]) -> Findings:
    """The inverse of :func:`to_document`. Raises ValueError, TypeError or KeyError for any other document."""
    findings = _converter.structure(document, Findings)
    others = [name for name in ORDER if name in document and not hasattr(findings, name)]
    classes = {name: getattr(file_of(name), name.title().replace("_", ""), None) for name in others}
    found = {name: _converter.structure(document[name], kind) for name, kind in classes.items() if kind}
    return replace(findings, of_checks=found)
