"""A scaler: something with a loss scale that takes steps. Each library's own code is one, and so is each policy."""

from typing import Protocol

from mpcompare.scalers.policies import ScalerPolicy


class Scaler(Protocol):
    """Takes steps whose gradients are finite or not.

    Attributes:
        scale: the loss scale of the next step.
    """

    @property
    def scale(self) -> float: ...

    def step(self, overflow: bool) -> bool:
        """Takes a step whose gradients overflow, or not, and returns whether the step was skipped.

        Raises:
            ScalerStopped: the library ends training here.
        """
        ...


class PolicyScaler:
    """Follows a policy of policies.py, and skips the steps that overflow."""

    def __init__(self, policy: ScalerPolicy) -> None:
        self.policy, self.state = policy, policy.start()

    @property
    def scale(self) -> float:
        return self.state.scale

    def step(self, overflow: bool) -> bool:
        self.state = self.policy.next(self.state, overflow)
        return overflow
