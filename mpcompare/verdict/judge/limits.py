"""The limits of the checks: derived from the rounding of the precision, and from the errors of the reference."""

import math

from mpcompare.precision import FORMATS, PRECISIONS
from mpcompare.verdict.judge.check import Examined
from mpcompare.verdict.judge.errors import GradientError, PlaceError, RoundingError

FP32 = FORMATS["fp32"].unit_roundoff
K = 2.0  # a run may make twice the errors of its reference: one that rounds twice as often makes 1.4 times as much
COARSEST = 0.1  # a tensor is seen if a relative error of this size would be found in it
RARE = 1e-3  # the share of correct values beyond a limit, if they vary at random as believed


def tensor_limit(run: Examined, reference: GradientError, rounding: RoundingError | None) -> float:
    """Returns the limit of the error of one tensor: the most that any implementation may lose.

    The limit is the larger of two numbers. One is K times the reference's error, and one more rounding of its largest
    element (with few elements, the reference's error may be small by luck). The other is K times what one rounding of
    each result makes. It is larger where the reference keeps in fp32 what others may round, as autocast does with a
    transformer's stream of residuals, or where terms cancel, as in a bias before a batch norm. The square of such an
    error varies as a sum of squares of ``dimensions`` Gaussians does (Satterthwaite, Biometrics Bulletin 2(6), 1946),
    and its mean is known from a few samples: together they make the F distribution. A reference's error may be beyond
    that, as in a norm that torch sums in 16 bits on a CPU. Then the reference shows one draw, and a run another: their
    ratio is F distributed, too. The errors of fp32 sums in another order are added: they grow like the root of the
    sums' length (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).
    """
    u, once = run.unit_roundoff, rounding.error if rounding else 0.0
    # The error of sums is relative to the size of the terms, which may cancel.
    sums = sum_error(run) * max(reference.norm, once / u, rounding.terms if rounding else 0.0)
    own = reference.error
    if rounding and once:
        if own > _largest_around_0(once, rounding):
            own *= ratio_quantile(rounding.dimensions, rounding.dimensions)
        once = largest_rounding(once, rounding)
    return max(K * own + u * reference.largest, K * once) + sums


def signed_limit(run: Examined, reference: GradientError, rounding: RoundingError | None) -> float | None:
    """Returns the limit of the part of an error in the direction of the gradient, relative to the gradient; None where
    it is not known.

    Rounding to nearest makes numbers as often larger as smaller. So this part is as small as in any other direction.
    Numbers that are cut off all become smaller, and their errors add up in this direction. The part of one more run is
    a Gaussian whose mean is 0 and whose variance is known from a few samples, which makes Student's t. The samples may
    be small in this direction by luck, but an error that varies in n dimensions has a mean square of 1/n of its own in
    each of them. The limit is K times the larger of both, or K times the reference's part. Where the reference's error
    is larger than what roundings make, its part in one direction is larger, too, but may be small by luck. fp32 is not
    judged so: a GPU may cut its operands off to TF32.
    """
    if rounding is None or not reference.norm or not PRECISIONS[run.precision].is_16_bit:
        return None
    once = max(1.0, max(rounding.error / run.unit_roundoff, rounding.terms) / reference.norm)
    number, n = rounding.samples, rounding.dimensions
    along = max(t_quantile(number) * rounding.along, t_quantile(number * n) * rounding.error / math.sqrt(n))
    along *= max(1.0, reference.error / rounding.error if rounding.error else 0.0)
    return K * max(abs(reference.slope - 1), along / reference.norm) + sum_error(run) * once


def place_limit(run: Examined, place: PlaceError, reference: PlaceError | None) -> float:
    """Returns the limit of the error at one place: K times what one rounding of each result makes there, as it is known
    from a few samples, or K times the reference's own error; and fp32 sums in another order."""
    return max(roundings(run, place), K * error_like(reference, place) if reference else 0.0)


def error_like(reference: PlaceError, place: PlaceError) -> float:
    """Returns the error of a reference as it would be with the operands of a run. The error is taken relative to the
    norm, or to the terms of the sum, whichever makes it larger. Where terms cancel, as in a weight's gradient before a
    batch norm, the norm of the sum says nothing of its error. Where a reference rounds no operand, its terms are not
    known, but they are no smaller than their sum. Where all is 0, as in a norm over single numbers, the error is as
    large as the reference's."""
    terms = max(reference.terms, reference.norm), max(place.terms, place.norm)
    sizes = (reference.norm, place.norm), terms
    return max((reference.error / other * own for other, own in sizes if other), default=reference.error)


def roundings(run: Examined, place: PlaceError, in_a_row: bool = False) -> float:
    """Returns the largest error that roundings alone may make at a place. In 16 bits a replay sums products in fp32,
    too.

    Args:
        in_a_row: whether sums of an fp32 run may be as wrong as such sums ever are. Equal terms that are added one by
            one, such as the gradients below an average over positions, are all rounded in one direction. Then the
            relative error grows with the number of terms, and not with the root of that number (Higham, "Accuracy and
            Stability of Numerical Algorithms", SIAM 2002, section 4.2). In 16 bits the roundings of results are larger.
            Else an fp32 run may have the error that one more replay in fp32 has, too, up to this bound.
    """
    rounded = K * largest_rounding(place.rounding, place)
    summed = sum_error(run) * max(place.norm, place.rounding / run.unit_roundoff, place.terms)
    if PRECISIONS[run.precision].is_16_bit:
        return rounded + 2 * summed
    most = math.sqrt(run.findings.longest_sum) * summed
    return rounded + (most if in_a_row else min(summed + place.in_common, most))


def largest_rounding(once: float, samples: RoundingError | PlaceError) -> float:
    """Returns the largest error that roundings make in one more run, as far as samples of them tell.

    The samples may have a mean of 0. Or they have a mean, as a kernel that sums in 16 bits gives them: one more error
    is then this mean, and a part around it whose size is known from one sample less. With the error of the mean itself
    its variance is 1 + 1 / samples of the samples' variance. The smaller of both numbers counts. ``once`` is the root
    mean square of the samples' norms.
    """
    around_0 = _largest_around_0(once, samples)
    number, around = samples.samples, samples.around
    if number < 2 or not samples.common:
        return around_0
    apart = math.sqrt(max(once**2 - samples.common**2, 0.0) * (number + 1) / (number - 1))
    return min(around_0, samples.common + apart * ratio_quantile(around, (number - 1) * around))


def _largest_around_0(once: float, samples: RoundingError | PlaceError) -> float:
    """Returns the largest error of one more run if the samples have a mean of 0."""
    return once * ratio_quantile(samples.dimensions, samples.samples * samples.dimensions)


def t_quantile(degrees: float) -> float:
    """Returns the number that Student's t exceeds, on either side together, in a share RARE of all cases."""
    from scipy import special  # slow to import, and an examination needs no limits

    return float(special.stdtrit(degrees, 1 - RARE / 2))


def ratio_quantile(above: float, below: float) -> float:
    """Returns the number that the ratio of two errors exceeds in a share RARE of all cases: the root of the F
    distribution's quantile for their dimensions."""
    from scipy import special

    return math.sqrt(float(special.fdtri(above, below, 1 - RARE)))


def update_part(run: Examined, u: float) -> float:
    """Returns by what part of itself one update may differ if each activation may be rounded once more or less.

    Updates that are linear in the gradients differ by 8 u if the gradients do. Adam's update is nearly ``lr`` times the
    gradient's sign. About a share 8 u of the gradients are within 8 u of 0. Their sign may turn, which moves each of
    their updates by 2 lr, and all updates by 2 sqrt(8 u) of their norm.
    """
    return 8 * u if run.findings.recipe.linear else 2 * math.sqrt(8 * u)


def sum_error(run: Examined) -> float:
    """Returns the relative error of the longest sum in fp32."""
    return math.sqrt(run.findings.longest_sum) * FP32


def reordered_loss(run: Examined, loss: float) -> float:
    """Returns how far the same computation with other orders of sums may move a loss: 4 standard deviations of what one
    rounding of each activation does to it, and fp32 sums."""
    first = run.findings.first.finite
    return 4 * (first.loss_noise if first else 0.0) + sum_error(run) * abs(loss)


def stored_coarsely(run: Examined) -> float:
    """Returns by how much, relatively, weights and buffers are rounded more than fp32 rounds them: 0 unless a backend
    promises that they are kept in another format."""
    return FP32 * (run.findings.promises.coarse_weights - 1)
