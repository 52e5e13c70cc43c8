"""Traces by the policies, whatever libraries are installed: quick, and the same on every machine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpcompare.scalers.overflows import OverflowStep
from mpcompare.scalers.registry import LIBRARIES
from mpcompare.scalers.trace import Trace, take


def by_policy(name: str, steps: Sequence[OverflowStep], said: str | None = None, **options: Any) -> Trace:
    """Returns the trace of a library's policy with other ``options``; ``said``: as if by the library's own code."""
    policy = replace(LIBRARIES[name].policy, **options)
    start = policy.scale
    return Trace(name, policy, said or name, said is not None, start, take(policy, steps))


def all_by_policy(steps: Sequence[OverflowStep], **options: Any) -> list[Trace]:
    return [by_policy(name, steps, **options) for name in LIBRARIES]
