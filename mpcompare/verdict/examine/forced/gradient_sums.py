"""The gradients of a replay. The calls of layers, and the work between layers, each add a part to a gradient.

In the step, the calls of one micro-batch may have one copy of a parameter in 16 bits, such as autocast's copy. The
gradient of the copy is the sum over these calls, in the copy's format. All else is summed in fp32.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable

from torch import Tensor

from mpcompare.tasks.task import Params


class GradientSums:
    """The gradients as far as they are there. Each is returned once it is whole: nobody keeps it here.

    Attributes:
        sources: by parameter the layers that its gradient comes from.
    """

    def __init__(self, calls: Counter[str], between: Container[str], summed: Callable[[Tensor], Tensor]) -> None:
        """Begins a step.

        Args:
            calls: by parameter the number of calls of its layers.
            between: the parameters that the work between layers uses, too.
            summed: is given the sum over the uses of a copy after each use, and returns what is kept.
        """
        self._left, self._between, self._summed = calls, between, summed
        self.sources: dict[str, set[str]] = {}
        self._grads: Params = {}
        self._copies: Params = {}  # the gradients of the copies of the micro-batch that is under way

    def is_alone(self, name: str) -> bool:
        """Returns whether the next part is all of a parameter's gradient."""
        return self._left[name] == 1 and not any(name in each for each in (self._grads, self._copies, self._between))

    def add(self, name: str, grad: Tensor, of: str, has_copy: bool = False) -> None:
        """Adds the part of the layer ``of`` to the gradient of a parameter; "": the part of the work between layers."""
        self.sources.setdefault(name, set()).add(of)
        if not has_copy:  # a sum in fp32, whatever is rounded
            self._grads[name] = self._grads[name] + grad if name in self._grads else grad
        else:
            self._copies[name] = self._summed(self._copies[name] + grad) if name in self._copies else grad

    def end_copies(self, names: Iterable[str] | None = None) -> None:
        """Ends the copies of some parameters, or of all: a micro-batch is over."""
        for name in [n for n in (self._copies if names is None else names) if n in self._copies]:
            grad = self._copies.pop(name)
            self._grads[name] = self._grads[name] + grad if name in self._grads else grad

    def counted(self, name: str) -> Params:
        """Counts a call of a layer with this parameter whose backward is over. After the last call it returns the whole
        gradient, unless the work between layers has a part in it."""
        self._left[name] -= 1
        return self._whole([name]) if not self._left[name] and name not in self._between else {}

    def end(self) -> Params:
        """Returns what is left, when the step is over."""
        return self._whole([*self._grads, *(name for name in self._copies if name not in self._grads)])

    def _whole(self, names: list[str]) -> Params:
        self.end_copies(names)
        return {name: self._grads.pop(name) for name in names if name in self._grads}
