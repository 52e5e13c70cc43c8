"""All bugs, in the order of their draw."""

from watch.bugs import amp_examples, hugging_face, lightning_loops, nanogpt, timm_loop, vision
from watch.bugs.registry import BUGS, LINKS

MODULES = (amp_examples, hugging_face, lightning_loops, nanogpt, timm_loop, vision)
BUGS.sort(key=lambda bug: list(LINKS).index(bug.id))

__all__ = ["BUGS", "MODULES"]
