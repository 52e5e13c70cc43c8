"""What a check came to."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Checked:
    """What :func:`check_backend` did.

    Attributes:
        columns: each task and precision that was checked, ``mlp bf16``.
        skipped: what was not, and why: a task and precision, or one check there, ``mlp bf16, overflow``.
    """

    columns: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class BrokenContract(AssertionError):  # noqa: N818 - said as it is, like BackendUnavailable
    """The rules that a backend breaks, a line each.

    Attributes:
        rules: each broken rule in a sentence, with the tasks and precisions in which it is broken.
    """

    def __init__(self, name: str, rules: list[str]) -> None:
        self.rules = rules
        count = "one rule" if len(rules) == 1 else f"{len(rules)} rules"
        super().__init__("\n  ".join([f"{name} breaks {count} of the contract:", *rules]))
