"""Each layer of the step that follows on training, beside the forced replay."""

from functools import partial

from mpcompare.verdict.judge.layers import of_replay

checks = partial(of_replay, name="last")
