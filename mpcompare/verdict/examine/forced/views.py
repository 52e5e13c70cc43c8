"""Outputs of layers that are views, and are written into: an instance norm returns a view, and an activation in place
follows. Autograd then takes the gradient through the base of the view, and calls no hook of the output."""

from torch import Tensor


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
