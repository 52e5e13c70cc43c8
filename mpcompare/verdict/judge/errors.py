"""The errors of tensors, as the examination measured them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientError:
    """The distance of a gradient from the exact one, with what tells the reason.

    Attributes:
        error: ``||g - exact||`` (Frobenius).
        norm: ``||exact||``.
        largest: ``max |exact|``.
        slope: the number that times ``exact`` is closest to g.
        residual: the error that is left after that.
        zeros: the share of the ``elements`` that became 0.
        elements: the number of elements that are not 0 in ``exact``.
        transposed: the error of the transposed gradient; None unless g is square and far off.
    """

    error: float
    norm: float
    largest: float
    slope: float
    residual: float
    zeros: float
    elements: int
    transposed: float | None = None

    @property
    def relative(self) -> float:
        """``||g - exact|| / ||exact||``; inf where g holds no number, or ``exact`` is 0 and g is not."""
        if not self.norm:
            return math.inf if self.error else 0.0
        relative = self.error / self.norm
        return relative if math.isfinite(relative) else math.inf


Errors = dict[str, GradientError | None]


def known(error: GradientError | None) -> GradientError:
    """Returns the error of a gradient that is known to be shown."""
    assert error is not None
    return error


def relative_error(error: GradientError | None) -> float:
    """``GradientError.relative``; inf where the gradient is missing."""
    return math.inf if error is None else error.relative


@dataclass(frozen=True)
class RoundingError:
    """The error of a tensor that one rounding of each result makes.

    Attributes:
        error: root mean square of ``||g - exact||``.
        dimensions: the number of dimensions in which ``g - exact`` varies.
        samples: the number of samples from which these are estimated.
        along: root mean square of the part of ``g - exact`` in the direction of ``exact``.
        terms: the size of what is summed, which may cancel; 0 where it is not known.
        zeros: the share of the elements that become 0, as numbers do that are too small for fp16.
    """

    error: float
    dimensions: float
    samples: int
    along: float
    terms: float = 0.0
    zeros: float = 0.0


RoundingErrors = dict[str, RoundingError]


@dataclass(frozen=True)
class PlaceError:
    """The error at one place of a layer compared with the forced replay: of what arrives there, of its output, or of
    the gradient that arrives at its output.

    Attributes:
        error: ``||recorded - exact||`` (Frobenius).
        norm: ``||exact||``.
        rounding, dimensions, samples, terms: as those of :class:`RoundingError`.
    """

    error: float
    norm: float
    rounding: float
    dimensions: float
    samples: int
    terms: float = 0.0

    @property
    def far(self) -> float:
        """The error in units of what roundings make."""
        return self.error / max(self.rounding, 2.0**-24 * self.norm, 1e-300)
