"""The errors that roundings make in a step, taken from earlier steps of the same network, as shares of its tensors.

Samples of roundings cost most of a comparison, and a few updates move weights little. So an earlier step is a first
measure for a later one. It accuses nobody: a step that is beyond it is compared once more, with samples of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mpcompare.precision import Precision
from mpcompare.verdict.examine.forced.call import Point
from mpcompare.verdict.examine.forced.places import Place
from mpcompare.verdict.judge.errors import GradientError, PlaceError, RoundingErrors
from mpcompare.verdict.judge.layers import Layers
from mpcompare.verdict.judge.limits import COARSEST, K

Gradients = Mapping[str, GradientError | None]


@dataclass
class EarlierSteps:
    """Steps that were compared with samples, and the precision of each. A network may have several sorts of steps, as a
    network with two losses has."""

    kept: list[tuple[Precision, Layers]] = field(default_factory=list)

    def like(self, precision: Precision, places: Iterable[Point], gradients: Gradients) -> Layers | None:
        """Returns the first step that has roundings of all these places and gradients; None where none has. The
        roundings must be a small part of their tensors: else a later step may be seen better than the earlier one."""
        names = {_name(point) for point in places}
        for own, layers in self.kept:
            if own == precision and names <= _small(layers) and gradients.keys() <= _small_gradients(layers):
                return layers
        return None


def carried_to_places(earlier: Layers, places: Mapping[Point, Place]) -> dict[Point, PlaceError]:
    """Returns the errors of a later step with roundings that are the same share of the norm as in an earlier step."""
    found = {}
    for point, later in places.items():
        place = earlier.places[_name(point)]
        part = later.norm / place.norm
        rounding, terms = part * place.rounding, part * place.terms
        found[point] = replace(place, error=later.error, norm=later.norm, rounding=rounding, terms=terms)
    return found


def carried_to_gradients(earlier: Layers, gradients: Gradients) -> RoundingErrors:
    """Returns what roundings make in the gradients of a later step: the same share of each as in an earlier step."""
    found = {}
    for name, e in gradients.items():
        rounding, before = earlier.rounding[name], earlier.gradients[name]
        part = e.norm / before.norm if e and before else 1.0
        error, along, terms = part * rounding.error, part * rounding.along, part * rounding.terms
        found[name] = replace(rounding, error=error, along=along, terms=terms)
    return found


def carried_to_loss(earlier: Layers, later: Layers) -> float:
    """Returns what roundings make in the loss of a later step: at least the same share of it as in an earlier step."""
    part = abs(later.exact_loss / earlier.exact_loss) if earlier.exact_loss else 1.0
    return max(later.loss_noise, part * earlier.loss_noise)


def _name(point: Point) -> str:
    return f"{point.kind} {point.layer}"


def _small(layers: Layers) -> set[str]:
    return {at for at, place in layers.places.items() if K * place.rounding < COARSEST * place.norm}


def _small_gradients(layers: Layers) -> set[str]:
    return {name for name, e in layers.gradients.items() if e and K * layers.rounding[name].error < COARSEST * e.norm}
