"""Is each operation right at weights at which nothing is nearly linear?

- *Value.* As `layers`, at weights at which nothing is nearly linear.
- *Limit.* As `layers`, at these weights.
"""

from functools import partial

from mpcompare.verdict.judge.layers import of_replay

checks = partial(of_replay, name="sharp")
