"""The registry of the third draw: real bugs of training loops, in the form of the second draw.

``drawn.csv`` names all threads that were met, the searches that found the taken ones, and why others were left out.
From each search the first threads were taken, four at most. Kinds, fair names and what was meant were written down
before a watch saw any of the loops.

The loop of pytorch/pytorch#193671 did not show its bug at first, and was mended before that: the activation has to be
the last layer that is recomputed. In the loop of ultralytics/ultralytics#25097 the loss is NaN and torch's gradients
are 0, so that it has the same weights as the right twin.
"""

from functools import partial

from watch.second_draw.registry import Bug, bug_of

BUGS: list[Bug] = []
bug = partial(bug_of, BUGS)
