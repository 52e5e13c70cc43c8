"""A loop in the form in which the judge is given a backend, and what the judge then says: defects, and its sight.

A defect is what no intention makes right. The sight is how much of the network was seen, and how large an error of a
gradient had to be to be found.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
from torch import Tensor, nn

from mpcompare.verdict.examine.forced.record import OUTPUT, is_real
from mpcompare.verdict.examine.layers import of_a_channel, owners, sums_with_weights
from mpcompare.verdict.findings import Findings, Recipe
from mpcompare.verdict.judge.check import Case, Check, Examined
from mpcompare.verdict.judge.drive import Drive, Gradients
from mpcompare.verdict.judge.sight import said, sight
from mpcompare.watching.examining import Replayed
from mpcompare.watching.looking import Look
from mpcompare.watching.steps import Sum


@dataclass(frozen=True)
class Defect:
    """Something that no intention makes right."""

    cause: str  # a word or two, like the causes of docs/verdict.md
    place: str  # the layer, parameter or part of the loop; may be empty
    sentence: str  # the defect with its numbers

    def __str__(self) -> str:
        return f"{self.cause}: {self.sentence}"


def as_examined(
    look: Look, precision: str, recipe: Recipe, longest_sum: int = 1, order: Sequence[str] = ()
) -> Examined:
    """Returns a loop in the form in which the judge is given a backend.

    Args:
        longest_sum: about how many numbers are summed at most.
        order: the layers in the order of their calls.
    """
    layers, nothing = owners(look.network, order, {}), Gradients(math.nan, math.nan, math.nan)
    findings = Findings(precision, recipe, longest_sum, layers, Drive(), nothing)
    return Examined("the loop", precision, {}, findings, pd.DataFrame())


def as_case(look: Look, seen: Sum, replay: Replayed) -> Case:
    """Returns a sum of gradients as a case for the judge, whose reference is exact."""
    order = [name for name in replay.dtypes for _ in seen.record.calls[name]]
    given = [[v for v in call.inputs if isinstance(v, Tensor) and v.dim()] for call in seen.record.calls[OUTPUT]]
    rows = sum(len(each[0]) for each in given if each) or 1
    recipe = Recipe(batch_size=rows, accumulate=len(seen.roots))
    run = as_examined(look, replay.precision, recipe, _longest_sum(look.network, seen), order)
    both = ({"first": layers} if layers is not None else {} for layers in (replay.layers, replay.reference))
    own, exact = (replace(run.findings, replays=replays) for replays in both)
    return Case(replace(run, findings=own), replace(run, name="exact", findings=exact))


def _longest_sum(network: nn.Module, seen: Sum) -> int:
    """Returns about how many numbers are summed at most: the longest sum with a weight, or over a channel in all
    places."""
    lengths = sums_with_weights(network)
    for name, calls in seen.record.calls.items():
        if name != OUTPUT:
            module, outputs = network.get_submodule(name), [v for call in calls for v in call.outputs if is_real(v)]
            lengths.append(sum(of_a_channel(module, v) for v in outputs if v.dim() > 1))
    return max(lengths, default=1)


def failed(checks: Iterator[Check]) -> Iterator[Defect]:
    """Yields a defect for each sentence on checks that failed, at the layer or the first tensor that it is about."""
    known = set()
    for check in checks:
        if not check.passed and check.because not in known:
            known.add(check.because)
            yield Defect(check.cause or "gradients", check.layer or check.tensor, check.because)


@dataclass(frozen=True)
class HowFar:
    """The sight of one look."""

    # by the name of each layer that was called, whether an error of ``COARSEST`` would be found in at least one update
    layers: dict[str, bool]
    parameters: dict[str, bool]  # by the name of each parameter that got a gradient, the same
    blind: list[str]  # the layers and parameters that were compared, but in which no such error would be found
    resolution: float  # the relative error that would be found in at least half of the gradients
    not_flagged: list[str]  # errors that were planted into what was found, and are not flagged, in words

    @property
    def is_blind(self) -> bool:
        """Whether no layer is seen. A network may have no layer in the record, as one of complex numbers only: then
        whether no parameter is."""
        return not any((self.layers or self.parameters).values())

    def __str__(self) -> str:
        """Returns the rest of the first line of a card."""
        if self.is_blind:
            return "none of their layers is seen"
        counts = {"layers": self.layers, "parameters": self.parameters}
        seen = [f"{sum(each.values())} of {len(each)} {what}" for what, each in counts.items() if each]
        size = f"; an error of {said(self.resolution)} in a gradient would have been found"
        return f"{' and '.join(seen)} are seen{size if any(self.parameters.values()) else ''}"


def sight_of(look: Look, sums: Mapping[Sum, Replayed]) -> HowFar:
    """Returns the sight of a look from the replays of its sums."""
    layers: dict[str, bool] = {}
    parameters = dict.fromkeys((name for taken in look.taken for name in taken.given), False)
    compared: dict[str, None] = {}
    not_flagged: dict[str, None] = {}
    resolution = 0.0
    for seen, replay in sums.items():
        layers = dict.fromkeys(replay.dtypes, False) | layers
        if replay.layers is None:
            continue
        found = sight(as_case(look, seen, replay))
        blind = set(found.blind if found else ())
        not_flagged |= dict.fromkeys(found.not_flagged if found else ())
        resolution = max(resolution, found.resolution if found else 0.0)
        outputs = [at.removeprefix("output ") for at in replay.layers.places if at.startswith("output ")]
        gradients = [name for name, error in replay.layers.gradients.items() if error is not None]
        for names, into in ((outputs, layers), (gradients, parameters)):
            for name in filter(into.__contains__, names):
                into[name] = into[name] or name not in blind
                compared[name] = None
    unseen = [name for name in compared if not (layers | parameters)[name]]
    return HowFar(layers, parameters, unseen, resolution, list(not_flagged))
