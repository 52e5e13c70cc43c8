"""The outcome of :func:`check_backend`."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Checked:
    """The list of what was checked, and of what was not.

    Attributes:
        candidates: each task and precision that was checked, ``mlp bf16``.
        skipped: by what was not checked, the reason: a task and precision, or one check there, ``mlp bf16, overflow``.
    """

    candidates: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class BrokenContract(AssertionError):  # noqa: N818 - said as it is, like BackendUnavailable
    """The requirements that a backend breaks, a line each.

    Attributes:
        requirements: each broken one in a sentence, with the tasks and precisions in which it is broken.
    """

    def __init__(self, name: str, requirements: list[str]) -> None:
        self.requirements = requirements
        count = "one requirement" if len(requirements) == 1 else f"{len(requirements)} requirements"
        super().__init__("\n  ".join([f"{name} breaks {count} of the contract:", *requirements]))
