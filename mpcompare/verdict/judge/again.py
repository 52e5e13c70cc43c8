"""Does a step that is taken twice give the same bits?

- *Value.* Loss and gradients of the first step, taken twice from one state, the second time with other random numbers
  in torch's generators.
- *Limit.* The same bits, but for twice the errors of fp32 sums in another order, since a GPU may take them in any.
- *Not checked* of a backend with masks of its own, or of one that declares that it does not repeat.
"""

from dataclasses import dataclass

from mpcompare.verdict.judge.check import Case, Check, Checks, worst_of
from mpcompare.verdict.judge.limits import K, sum_error
from mpcompare.verdict.judge.trajectories import draws_alike


@dataclass(frozen=True)
class Again:
    """A step that was taken twice from one state."""

    seen: list[str]  # the names of what was looked at, ``loss`` and the gradients that are shown
    apart: dict[str, float]  # by name the distance between both, relative to the first, where any bit differs


def checks(case: Case) -> Checks:
    """Yields one check of the loss and all gradients. Gradients that differ in the reference, too, are left out."""
    run, reference = case.found("again")
    if case.is_reference or run is None or reference is None or not case.run.findings.promises.repeats:
        return
    if not draws_alike(case.run, case.reference):
        return
    apart = {name: distance for name, distance in run.apart.items() if name not in reference.apart}
    worst = worst_of(apart)
    value = apart.get(worst, 0.0)
    because = f"a step that is taken twice from one state gives other numbers, and {case.reference.name}'s does not: "
    because += f"{worst} is {value:.1e} of its norm away"
    yield Check("one step twice", value, K * sum_error(case.run), "noise", because)
