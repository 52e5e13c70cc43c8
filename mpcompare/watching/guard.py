"""Keeps errors of the watch itself away from the loop that it watches, and compilers away from the watch."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from mpcompare.errors import first_line


class Guard:
    """Calls parts of the watch. The first error ends the look: from then on nothing is called."""

    def __init__(self) -> None:
        self.error = ""  # what was not examined because of an error
        self.calls = False  # whether it is calling a part of the watch
        # A loop may compile the step of its optimizer, whose hooks call us. Such a loop has imported the compiler.
        self._call = torch.compiler.disable(self._called) if "torch._dynamo" in sys.modules else self._called

    def __call__(self, part: Callable[..., Any], *given: Any) -> Any:
        """Returns what a part returns; None where this part or an earlier one stopped with an error."""
        return self._call(part, *given)

    def _called(self, part: Callable[..., Any], *given: Any) -> Any:
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
