"""Keeps errors of the watch itself away from the loop that it watches."""

from collections.abc import Callable
from typing import Any

from mpcompare.errors import first_line


class Guard:
    """Calls parts of the watch. The first error ends the look: from then on nothing is called.

    Attributes:
        error: what was not examined for it; empty where there was none.
        calls: whether it calls one at the moment.
    """

    def __init__(self) -> None:
        self.error, self.calls = "", False

    def __call__(self, part: Callable[..., Any], *given: Any) -> Any:
        """Returns what a part returns; None where it stopped with an error, or another part did before."""
        if self.error:
            return None
        outer, self.calls = self.calls, True
        try:
            return part(*given)
        except Exception as error:
            self.error = f"what came after the watch itself stopped with {first_line(error)}"
            return None
        finally:
            self.calls = outer
