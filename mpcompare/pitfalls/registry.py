"""The list of all pitfalls."""

from collections.abc import Mapping

from mpcompare.pitfalls.norms import layer_norm, mean_of_squares, norm
from mpcompare.pitfalls.optimizers import adam_eps, beta2, step_counter
from mpcompare.pitfalls.pitfall import Pitfall
from mpcompare.pitfalls.range import lost_update, overflow, positions, underflow
from mpcompare.pitfalls.softmax import softmax
from mpcompare.pitfalls.sums import kahan, stochastic_rounding, sums

# Pitfalls by name, in the order in which they are shown.
PITFALLS: Mapping[str, Pitfall] = {
    each.name: each
    for each in (
        *(underflow, overflow, lost_update, sums, mean_of_squares, norm, softmax, layer_norm, adam_eps, beta2),
        *(step_counter, positions, stochastic_rounding, kahan),
    )
}
