"""The arguments of a call: its settings under any of their names, and the command's fields in its words."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mpcompare.errors import InputError

WORDS = {
    "data._target_=the data": "data", "data=the data": "the data", "data._target_": "data", "task.loss": "loss",
    "task.model._target_": "model", "task.model": "model", "task.batch_size": "batch_size", "train.steps": "steps",
    "task.optimizer.lr": "lr", "hydra.sweep.dir": "folder",
}  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """The arguments of :func:`mpcompare.api.compare.compare`."""

    model: Any
    loss: Any
    data: Any
    backends: list[Any]
    precision: Any
    optimizer: Any
    lr: Any
    batch_size: Any
    steps: Any
    knobs: Mapping[str, Any]

    def setting(self, section: str, name: str | None = None) -> Any:
        """Returns what the knobs set; None where they do not. ``**{"task.samples": 9}`` sets what
        ``task={"samples": 9}`` does."""
        values = self.knobs.get(section)
        if name is None:
            return values
        return self.knobs.get(f"{section}.{name}", values.get(name) if isinstance(values, Mapping) else None)

    @contextmanager
    def in_own_words(self) -> Iterator[None]:
        """Names the arguments, and not the fields of the command, in an InputError that is raised inside; but for the
        fields that the call has named."""
        try:
            yield
        except InputError as error:
            line = str(error)
            for field, word in WORDS.items():
                if self.setting(*field.split(".", 1)) is None:
                    line = re.sub(rf"(?<![\w.]){re.escape(field)}(?![\w.])", word, line)
            raise InputError.of(line) from error
