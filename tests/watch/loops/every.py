"""All loops, in the order of their modules."""

from watch.loops import amp_examples, hugging_face, lightning_loops, nanogpt, timm_loop, vision
from watch.loops.base import LOOPS

MODULES = (nanogpt, vision, timm_loop, amp_examples, hugging_face, lightning_loops)

__all__ = ["LOOPS", "MODULES"]
