"""The pass that makes what all others have in common: device, precision, network, data, clock."""

from dataclasses import dataclass, replace

from mpcompare.entrant.examined_memory import ExaminedMemory
from mpcompare.entrant.setup import set_up
from mpcompare.entrant.state import Entrant, Pass


@dataclass(frozen=True)
class SetUpPart:
    """A part of ``result.json``.

    Attributes:
        precision: resolved.
        engine: the answer of a new backend to what computes its products.
        loss_scale: the name of its kind.
        construct_s: seconds in which the first backend was made.
        dataset, dataset_reason: the data set, and why it was taken.
        dataset_fingerprint, initial_weights: hashes of both.
        not_finite: :attr:`mpcompare.entrant.setup.Setup.not_finite`.
    """

    precision: str
    engine: str
    loss_scale: str
    construct_s: float
    dataset: str
    dataset_reason: str
    dataset_fingerprint: str
    initial_weights: str
    not_finite: str


def take(entrant: Entrant) -> Pass[SetUpPart]:
    """Needs nothing. Leaves ``memory`` and ``setup``; nothing is examined where its data are not finite."""
    yield from ()
    entrant.memory = ExaminedMemory(entrant.apart)
    setup = entrant.setup = set_up(entrant.plan, entrant.shared)
    if setup.not_finite:  # what such data do is no fault of a backend
        entrant.plan = replace(entrant.plan, verdict=replace(entrant.plan.verdict, enabled=False))
    return SetUpPart(
        precision=setup.precision,
        engine=setup.engine,
        loss_scale=setup.loss_scale.name,
        construct_s=setup.construct_s,
        dataset=setup.dataset.name,
        dataset_reason=setup.dataset.reason,
        dataset_fingerprint=setup.dataset_fingerprint,
        initial_weights=setup.initial_weights,
        not_finite=setup.not_finite,
    )
