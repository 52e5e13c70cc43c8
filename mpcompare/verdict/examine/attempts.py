"""Passes that may stop with an error: what the others found stands all the same."""

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpcompare.errors import one_line, want_of_memory
from mpcompare.instruments import heap
from mpcompare.verdict.examine.forced.random_numbers import NotReplayedError

log = logging.getLogger(__name__)

Y = TypeVar("Y")
T = TypeVar("T")


@dataclass
class Attempts:
    """Takes passes one by one, whatever they raise."""

    found: dict[str, Any] = field(default_factory=dict)  # what they found, by the field of the findings
    stopped: dict[str, str] = field(default_factory=dict)  # by name of a pass the error that it stopped with, in a line
    # why a step cannot be replayed layer by layer, by name of the pass
    hidden: dict[str, str] = field(default_factory=dict)

    def find(self, field: str, found: Callable[[], object], name: str = "") -> None:
        """Takes a pass of this name, or that of its field; None is found where it stops."""
        self.found[field] = self.take(name or field, found, None)

    def take(self, name: str, found: Callable[[], T], otherwise: T) -> T:
        """Returns what a pass finds, or ``otherwise`` where it stops. The next one has other tensors: freed memory goes
        back to the system."""
        try:
            return found()
        except NotReplayedError as error:
            self.hidden[name] = str(error)
            return otherwise
        except Exception as error:  # a backend, or a network, may raise anything
            self._write(name, error)
            return otherwise
        finally:
            heap.trim()

    def over(self, name: str, found: Generator[Y, Any, T], otherwise: T) -> Generator[Y, Any, T]:
        """Does the same for a pass that yields its progress."""
        try:
            return (yield from found)
        except Exception as error:
            self._write(name, error)
            return otherwise

    def _write(self, name: str, error: Exception) -> None:
        self.stopped[name] = want_of_memory(error) or one_line(f"{type(error).__name__}: {error}")
        log.warning("the pass %s of the examination stopped: %s", name, self.stopped[name], exc_info=error)
