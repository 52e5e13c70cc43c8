"""All bugs of the fourth draw, in the order of the table that was made blind, and the careful loops."""

from watch.fourth_draw import careful_losses, careful_updates, facts, losses, optimizers, updates
from watch.fourth_draw.registry import BUGS, CAREFUL

MODULES = (optimizers, updates, losses, facts, careful_updates, careful_losses)

__all__ = ["BUGS", "CAREFUL", "MODULES"]
