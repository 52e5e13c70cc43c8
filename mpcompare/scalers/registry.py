"""The libraries that are compared, torch first: the policy of each, its own code, and how to install it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mpcompare.errors import in_full
from mpcompare.foreign import version
from mpcompare.precision import FP32
from mpcompare.scalers import libraries
from mpcompare.scalers.policies import AsInDeepSpeed, AsInFlax, AsInKeras, AsInMegatron, Scaler, ScalerPolicy

INSTALL = "pip install 'mpcompare[scalers]'"  # brings all libraries


@dataclass(frozen=True)
class Library:
    """A library with a dynamic loss scale."""

    name: str  # the word by which it is chosen on the command line
    package: str  # its name for pip
    policy: ScalerPolicy  # does what the library's code does, with its defaults
    own: Callable[[ScalerPolicy], Scaler]  # makes its own scaler, which imports the library

    @property
    def installed(self) -> str | None:
        """The version that is installed; None if there is none."""
        return version(self.package)

    def scaler(self, policy: ScalerPolicy) -> tuple[Scaler, str]:
        """Returns the library's own scaler and its version, or a copy of the policy and why that stands in for it."""
        why = "not installed"
        if self.installed is not None:
            try:
                return self.own(policy), f"{self.package} {self.installed}"
            except Exception as error:  # a library that does not fit this machine may fail in any way
                why = f"{self.installed} fails: {in_full(error)}"
        return replace(policy), f"{self.name} ({why})"


DEEPSPEED = AsInDeepSpeed(growth_interval=1000, hysteresis=2, min_scale=1.0)
MEGATRON = AsInMegatron(init_scale=2.0**32, growth_interval=1000, hysteresis=2, min_scale=1.0)
LIBRARIES: Mapping[str, Library] = {
    each.name: each
    for each in (
        Library("torch", "torch", ScalerPolicy(), libraries.Torch),
        Library("keras", "keras", AsInKeras(init_scale=2.0**15), libraries.Keras),
        Library("jmp", "jmp", ScalerPolicy(init_scale=2.0**15, min_scale=1.0), libraries.Jmp),
        Library("flax", "flax", AsInFlax(min_scale=FP32.smallest_normal), libraries.Flax),
        Library("deepspeed", "deepspeed", DEEPSPEED, libraries.DeepSpeed),
        Library("megatron", "megatron-core", MEGATRON, libraries.Megatron),
    )
}
