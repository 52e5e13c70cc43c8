"""Passes that may stop with an error: what other passes found stands all the same."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpcompare.errors import one_line, want_of_memory
from mpcompare.instruments import heap
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Attempts:
    """Takes passes one by one, whatever they raise."""

    found: dict[str, Any] = field(default_factory=dict)  # what they found, by the field of the findings
    stopped: dict[str, str] = field(default_factory=dict)  # by name of a pass the error that it stopped with, in a line
    # why a step cannot be replayed layer by layer, by name of the pass
    hidden: dict[str, str] = field(default_factory=dict)

    def find(self, field: str, found: Callable[..., object], *arguments: Any) -> None:
        """Takes a pass with these arguments, and keeps what it finds under the name ``field``; None where it stops."""
        self.found[field] = self.take(field, found, *arguments)

    def take(self, name: str, found: Callable[..., T], *arguments: Any) -> T | None:
        """Returns what a pass finds; None where it stops."""
        with self.at(name):
            return found(*arguments)
        return None

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """While it is entered, the pass of this name is taken. An error ends this pass, and no other. The next pass has
        other tensors, so freed memory goes back to the system."""
        try:
            yield
        except NotReplayedError as error:
            self.hidden[name] = str(error)
        except Exception as error:  # a backend, or a network, may raise anything
            self.stopped[name] = want_of_memory(error) or one_line(f"{type(error).__name__}: {error}")
            log.warning("the pass %s of the examination stopped: %s", name, self.stopped[name], exc_info=error)
        finally:
            heap.trim()
