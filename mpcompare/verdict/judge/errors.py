"""The errors of tensors, as the examination measured them, and the layers that own the tensors."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientError:
    """The distance of a gradient from the exact one, with what tells the reason."""

    error: float  # ``||g - exact||`` (Frobenius)
    norm: float  # ``||exact||``
    largest: float  # ``max |exact|``
    slope: float  # the number that times ``exact`` is closest to g
    residual: float  # the error that is left after the multiplication by ``slope``
    zeros: float  # the share of the ``elements`` that became 0
    elements: int  # the number of elements that are not 0 in ``exact``
    transposed: float | None = None  # the error of the transposed gradient; None unless g is square and far off

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
    """The error that one rounding of each result makes in a tensor."""

    error: float  # root mean square of ``||g - exact||``
    dimensions: float  # the number of dimensions in which ``g - exact`` varies
    samples: int  # the number of samples from which these are estimated
    along: float  # root mean square of the part of ``g - exact`` in the direction of ``exact``
    terms: float = 0.0  # the size of what is summed, which may cancel; 0 where it is not known
    zeros: float = 0.0  # the share of the elements that become 0, as numbers do that are too small for fp16
    # the share of the elements that are 0 in the record, and whose exact value is no larger than one fp32 rounding of
    # its sum, or than numbers that kernels take for 0
    cancelled: float = 0.0
    # the norm of the mean of the samples, and the number of dimensions in which they vary around it; a kernel that sums
    # in 16 bits makes the same error in each sample
    common: float = 0.0
    around: float = 1.0


RoundingErrors = dict[str, RoundingError]


@dataclass(frozen=True)
class PlaceError:
    """The error at one place of a layer compared with the forced replay: of what arrives there, of its output, or of
    the gradient that arrives at its output."""

    error: float  # ``||recorded - exact||`` (Frobenius)
    norm: float  # ``||exact||``
    rounding: float  # this field and the next ones: as in :class:`RoundingError`
    dimensions: float
    samples: int
    terms: float = 0.0
    common: float = 0.0
    around: float = 1.0
    in_common: float = 0.0  # the part of ``error`` that one more replay in fp32 makes, too

    @classmethod
    def of(cls, error: float, norm: float, once: RoundingError) -> "PlaceError":
        """Returns the error at a place where roundings make the error ``once``."""
        return cls(error, norm, once.error, once.dimensions, once.samples, once.terms, once.common, once.around)

    @property
    def far(self) -> float:
        """The error over the error that roundings make, without what a replay in fp32 makes, too."""
        return (self.error - self.in_common) / max(self.rounding, 2.0**-24 * self.norm, 1e-300)


@dataclass(frozen=True)
class Layer:
    """The owner of a tensor."""

    layer: str  # the name of the layer
    kind: str  # the class of the layer
    inside: list[str]  # the classes of the modules around it, the outermost first
    part: str  # the tensor's name in it, such as ``weight``
    place: int  # among the layers in the order of their calls; -1 for one that is no layer of its own
    after: str = ""  # the layer whose output is its input as it is; empty where there is none
    # how often the tensor is used in a step, as far as layers tell: once for each call of each of its layers, of which
    # a tied tensor has several
    uses: int = 1

    @property
    def role(self) -> str:
        """The role of the layer, if its class or the class of a module around it tells it; else an empty string."""
        if "Embedding" in self.kind:
            return "embedding"
        if "Norm" in self.kind:
            return "normalization"
        if self.kind.removesuffix("Cell") in ("RNN", "LSTM", "GRU"):
            return "recurrent layer"
        return "attention" if any("Attention" in name for name in (self.kind, *self.inside)) else ""
