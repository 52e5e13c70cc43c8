"""Is each operation right at the trained weights?

- *Value.* As `layers`, in the step after training.
- *Limit.* As `layers`, at the trained weights.
"""

from functools import partial

from mpcompare.verdict.judge.layers import of_replay

checks = partial(of_replay, name="last")
