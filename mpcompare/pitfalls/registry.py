"""The list of all pitfalls."""

from collections.abc import Mapping

from mpcompare.pitfalls.norms import LAYER_NORM, MEAN_OF_SQUARES, NORM
from mpcompare.pitfalls.optimizers import ADAM_EPS, BETA2_IN_BF16, STEP_COUNTER
from mpcompare.pitfalls.pitfall import Pitfall
from mpcompare.pitfalls.positions import POSITIONS
from mpcompare.pitfalls.range import LOST_UPDATE, OVERFLOW, UNDERFLOW
from mpcompare.pitfalls.rescue import KAHAN, STOCHASTIC_ROUNDING
from mpcompare.pitfalls.softmax import SOFTMAX
from mpcompare.pitfalls.sums import SUMS

# Pitfalls by name, in the order in which they are shown.
PITFALLS: Mapping[str, Pitfall] = {
    each.name: each
    for each in (
        UNDERFLOW,
        OVERFLOW,
        LOST_UPDATE,
        SUMS,
        MEAN_OF_SQUARES,
        NORM,
        SOFTMAX,
        LAYER_NORM,
        ADAM_EPS,
        BETA2_IN_BF16,
        STEP_COUNTER,
        POSITIONS,
        STOCHASTIC_ROUNDING,
        KAHAN,
    )
}
