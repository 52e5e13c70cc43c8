"""The number formats, and the precisions of training that are made of them.

    precision   stored    operands of products   loss scale   why
    fp32        fp32      fp32                   none         the baseline
    tf32        fp32      tf32                   none         a GPU rounds the operands of fp32 products by itself
    fp16        fp16      fp16                   dynamic      gradients below 2^-25 would round to 0
    bf16        bf16      bf16                   none         it has fp32's range

Master weights, sums of products and the loss are fp32 in all of them. To add a precision is to add an entry to
``PRECISIONS``, and to ``FORMATS`` where it multiplies or stores numbers of another kind.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mpcompare.errors import InputError, check_choice, did_you_mean


@dataclass(frozen=True)
class Format:
    """A binary floating point format as IEEE 754 lays them out: subnormal numbers below the smallest exponent, inf and
    NaN in place of the largest."""

    name: str
    exponent_bits: int
    mantissa_bits: int  # the stored ones, without the leading 1
    bytes: int  # the size of a number in memory. TF32 is fp32 in memory: a product ignores its last 13 bits

    @property
    def unit_roundoff(self) -> float:
        """Rounding to nearest changes a normal number by at most this, relatively."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number that has all its digits."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number; half of it rounds to 0."""
        return self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def maximum(self) -> float:
        """The largest finite number."""
        return (2 - 2.0**-self.mantissa_bits) * 2.0 ** (2 ** (self.exponent_bits - 1) - 1)


FP32 = Format("fp32", exponent_bits=8, mantissa_bits=23, bytes=4)
TF32 = Format("tf32", exponent_bits=8, mantissa_bits=10, bytes=4)
FP16 = Format("fp16", exponent_bits=5, mantissa_bits=10, bytes=2)
BF16 = Format("bf16", exponent_bits=8, mantissa_bits=7, bytes=2)
FORMATS = {each.name: each for each in (FP32, TF32, FP16, BF16)}


@dataclass(frozen=True)
class Precision:
    """The formats in which a training step stores and multiplies its numbers."""

    name: str
    storage: Format  # the format of activations, and of gradients by them, between operators
    # weight, activation, gradient: the formats of the operands of products. Forward multiplies activation and weight;
    # backward multiplies gradient and weight, and activation and gradient.
    weight: Format
    activation: Format
    gradient: Format
    loss_scale: str = "none"  # the name of the policy that ``loss_scale=auto`` stands for

    @property
    def unit_roundoff(self) -> float:
        """The unit roundoff of the operand format with the fewest digits."""
        return max(operand.unit_roundoff for operand in (self.weight, self.activation, self.gradient))

    @property
    def is_16_bit(self) -> bool:
        """Whether numbers are stored in 16 bits between operators."""
        return self.storage.bytes == 2

    @property
    def uses_tf32(self) -> bool:
        """Whether products of fp32 numbers round their operands to TF32, as CUDA's can where they are allowed to."""
        return TF32 in (self.weight, self.activation, self.gradient)


PRECISIONS = {
    each.name: each
    for each in (
        Precision("fp32", FP32, weight=FP32, activation=FP32, gradient=FP32),
        Precision("tf32", FP32, weight=TF32, activation=TF32, gradient=TF32),
        Precision("fp16", FP16, weight=FP16, activation=FP16, gradient=FP16, loss_scale="dynamic"),
        Precision("bf16", BF16, weight=BF16, activation=BF16, gradient=BF16),
    )
}


def preferred(device_type: str) -> Precision:
    """Returns the precision that ``auto`` stands for: fp16 on CUDA; bf16 on a CPU, where torch's fp16 product is 100
    times slower."""
    return PRECISIONS["fp16" if device_type == "cuda" else "bf16"]


def resolve_precision(precision: str, accepted: tuple[str, ...], device_type: str, backend: str) -> str:
    """Returns the name of the precision that a backend is to train in, which is one of its own ``PRECISIONS``
    (``accepted``). ``auto`` is the device's :func:`preferred` one if the backend accepts it, else the first of its own.
    Raises InputError for an unknown precision, one that this backend does not do, and TF32 without a CUDA device."""
    check_choice("precision", precision, ("auto", *PRECISIONS))
    if precision == "auto":
        name = preferred(device_type).name
        return name if name in accepted else accepted[0]
    if precision not in accepted:
        raise InputError("precision", precision, f"backend={backend} accepts one of auto, {', '.join(accepted)}")
    if PRECISIONS[precision].uses_tf32 and device_type != "cuda":
        raise InputError("precision", precision, f"needs a CUDA device, this run is on {device_type}")
    return precision


def meant_precision(word: object, accepted: Iterable[str]) -> str:
    """Returns :func:`did_you_mean` of the name of a precision, which may be torch's name of a dtype."""
    return did_you_mean(str(word).replace("bfloat", "bf").replace("float", "fp"), accepted)
