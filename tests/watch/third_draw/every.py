"""All bugs of the third draw, in the order of the table that was made blind."""

from watch.third_draw import backwards, loops, losses, norms, parts, steps
from watch.third_draw.registry import BUGS

MODULES = (backwards, loops, losses, norms, parts, steps)

__all__ = ["BUGS", "MODULES"]
