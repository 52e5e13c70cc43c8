"""The errors that roundings make in a step, taken from earlier steps of the same network, as shares of its tensors.

Samples of roundings cost most of a comparison, and a few updates move weights little. So an earlier step is a first
measure for a later one. It accuses nobody: a step that is beyond it is compared once more, with samples of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpcompare.precision import Precision
from mpcompare.verdict.examine.forced.arithmetic import Point
from mpcompare.verdict.examine.forced.places import Place, worst_calls
from mpcompare.verdict.judge.limits import COARSEST, K
from mpcompare.verdict.judge.replayed import Layers


@dataclass
class EarlierSteps:
    """Steps that were compared with samples, and the precision of each. A network may have several sorts of steps, as a
    network with two losses has."""

    kept: list[tuple[Precision, Layers]] = field(default_factory=list)

    def carried(self, precision: Precision, later: Layers, places: Mapping[Point, Place]) -> Layers | None:
        """Returns a later step with the roundings of the first earlier step that has roundings of all these places and
        gradients; None where none has. The roundings must be a small part of their tensors: else a later step may be
        seen better than the earlier one."""
        names = {point.name for point in places}
        for own, earlier in self.kept:
            small = {at for at, place in earlier.places.items() if K * place.rounding < COARSEST * place.norm}
            errors = ((name, e, K * earlier.rounding[name].error) for name, e in earlier.gradients.items() if e)
            gradients = {name for name, e, rounding in errors if rounding < COARSEST * e.norm}
            if own == precision and names <= small and later.gradients.keys() <= gradients:
                return _carried(earlier, later, places)
        return None


def _carried(earlier: Layers, later: Layers, places: Mapping[Point, Place]) -> Layers:
    """Returns a later step with roundings that are the same share of each norm as in an earlier step, and at least the
    same share of the loss."""
    errors, rounding = {}, {}
    for point, place in places.items():
        known = earlier.places[point.name]
        part = place.norm / known.norm
        scaled = {each: part * getattr(known, each) for each in ("rounding", "terms", "common")}
        errors[point] = replace(known, error=place.error, norm=place.norm, in_common=0.0, **scaled)
    for name, e in later.gradients.items():
        once, before = earlier.rounding[name], earlier.gradients[name]
        part = e.norm / before.norm if e and before else 1.0
        scaled = {each: part * getattr(once, each) for each in ("error", "along", "terms", "common")}
        rounding[name] = replace(once, **scaled)
    part = abs(later.exact_loss / earlier.exact_loss) if earlier.exact_loss else 1.0
    noise = max(later.loss_noise, part * earlier.loss_noise)
    return replace(later, places=worst_calls(errors), rounding=rounding, loss_noise=noise)
