"""The sight of a look: how much of the network was seen, and how large an error of a gradient had to be to be found."""

from collections.abc import Mapping
from dataclasses import dataclass

from mpcompare.verdict.judge.sight import said, sight
from mpcompare.watching.defects_of_layers import as_case
from mpcompare.watching.examining import Replayed
from mpcompare.watching.looking import Look
from mpcompare.watching.steps import Sum


@dataclass(frozen=True)
class HowFar:
    """The sight of one look."""

    # by the name of each layer that was called, whether an error of ``COARSEST`` would be found in at least one update
    layers: dict[str, bool]
    parameters: dict[str, bool]  # by the name of each parameter that got a gradient, the same
    blind: list[str]  # the layers and parameters that were compared, but in which no such error would be found
    resolution: float  # the relative error that would be found in at least half of the gradients
    not_flagged: list[str]  # errors that were planted into what was found, and are not flagged, in words

    def __str__(self) -> str:
        """Returns the rest of the first line of a card."""
        if not any(self.layers.values()):
            return "none of their layers is seen"
        layers, parameters = (f"{sum(each.values())} of {len(each)}" for each in (self.layers, self.parameters))
        size = f", and {said(self.resolution)}" if any(self.parameters.values()) else ""
        return f"{layers} layers and {parameters} parameters are seen{size}"


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
