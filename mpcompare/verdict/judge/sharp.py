"""Each layer of a step at weights at which nothing is nearly linear, beside the forced replay."""

from functools import partial

from mpcompare.verdict.judge.layers import of_replay

checks = partial(of_replay, name="sharp")
