"""The gradients that arrive at the outputs of layers while backward is taken.

Some outputs are views, and are written into: an instance norm returns a view, and an activation in place follows.
Autograd then takes the gradient through the base of the view, and calls no hook of the output.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mpcompare.verdict.examine.forced.record import Call, Record


class View:
    """A tensor that is a view of another tensor, its base. ``is_new`` is whether a layer has just written into it."""

    def __init__(self, value: Tensor, base: Tensor, is_new: bool = False) -> None:
        self.is_new = is_new
        self.number = base.output_nr  # the number of the base among the results of its function
        self._numbers, self._version = value.detach(), value._version  # a detached tensor counts the same writes
        self._base = base.shape, base.stride()
        self._place = value.shape, value.stride(), value.storage_offset() - base.storage_offset()

    def is_written(self) -> bool:
        """Returns whether something was written into it."""
        return self.is_new or self._numbers._version != self._version

    def of(self, gradient: Tensor) -> Tensor:
        """Returns the same view of a gradient of the base."""
        return gradient.new_empty_strided(*self._base).copy_(gradient).as_strided(*self._place)


class Arrivals:
    """Writes the gradients that arrive into a record.

    Attributes:
        record: the record that is written.
        copy: makes the copies of tensors that the record keeps.
        guard: calls a method with its arguments; each hook goes through it.
        passes: the numbers of the backward passes that have come to a layer since somebody emptied this set; None where
            each call may have one pass alone.
        life: the graph of the network's call that is under way keeps it alive.
        handles: the handles of hooks on outputs that are parameters.
        whole: the calls of the network that are under way.
    """

    def __init__(self, copy: Callable[[Tensor], Tensor], guard: Callable[..., Any]) -> None:
        self.record, self.copy, self.guard = Record(), copy, guard
        self.passes: set[int] | None = None
        self.life: object = None
        self.handles: list[RemovableHandle] = []
        self.whole: list[Call] = []

    def listen(self, name: str, call: Call, place: int, value: Tensor) -> None:
        """Puts hooks on an output: its gradient is kept when it arrives."""
        with torch._C.DisableTorchFunction():  # another look sees what hooks a loop puts on tensors
            handle = value.register_hook(partial(self.guard, self._put, name, call, place))
        if value.is_leaf:
            self.handles.append(handle)
        if (node := value.grad_fn) is not None:
            hooks, number = value._backward_hooks, value.output_nr
            node.register_prehook(partial(self.guard, self._put_again, call, place, hooks, number, self.life))
        base = value._base if value._is_view() else None
        if base is not None and base.grad_fn is not None and base.dtype is value.dtype:
            view = View(value, base, call.into is not None)
            through = partial(self.guard, self._put_through, name, call, place, view)
            base.grad_fn.register_prehook(through)

    def _gradients(self, call: Call) -> list[Tensor | None]:
        """Returns the gradients of the backward pass that is under way, to be filled in."""
        return call.gradients if self.passes is None else call.gradients_of(torch._C._current_graph_task_id())

    def _put(self, name: str, call: Call, place: int, gradient: Tensor | None) -> None:
        if gradient is None:  # a function of the network's own may pass no gradient
            return
        gradients = self._gradients(call)
        if self.passes is not None:
            self.passes.add(torch._C._current_graph_task_id())
        if self.whole and self.passes is None:
            self.record.hidden = f"the network asks for a gradient at {name or 'its output'} while it is called"
        elif gradients[place] is not None and not self.record.hidden:
            self.record.hidden = f"two backward passes go through one call of {name or 'the network'}"
        gradients[place] = self.copy(gradient)

    def _put_again(
        self, call: Call, place: int, hooks: Any, number: int, _: object, arrived: Sequence[Tensor | None]
    ) -> None:
        """Keeps the gradient that hooks of the network's own have left, where the network put hooks on an output."""
        gradients = self._gradients(call)
        if len(hooks) > 1 and gradients[place] is not None and (gradient := arrived[number]) is not None:
            gradients[place] = self.copy(gradient)

    def _put_through(self, name: str, call: Call, place: int, view: View, arrived: Sequence[Tensor | None]) -> None:
        """Keeps the gradient of an output that is a view and was written into since, as by an activation in place.
        Autograd then takes its gradient through the base of the view, and no hook of the output is called. The output
        of such an activation has the gradients of all that goes on from the base."""
        gradient, gradients = arrived[view.number], self._gradients(call)
        if gradient is None:
            return
        if view.is_new:
            gradients[place] = None
        if view.is_written() and gradients[place] is None:
            self._put(name, call, place, view.of(gradient))
