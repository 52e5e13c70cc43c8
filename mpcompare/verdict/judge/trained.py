"""Does the update after training follow from the state?

- *Value.* The update of the trained backend's next step, replayed from the optimizer state that it has by then: the
  weights, what the optimizer remembers, the clip factor. Of a larger tensor 65,536 elements are taken, evenly spread.
- *Limit.* The limit of one update. For moments 8 roundings of the terms of m, and 12 of the terms of v, each 2^-24.
- *Not checked* if that step is skipped, or if the backend remembers something else than the optimizer.
"""

from dataclasses import dataclass, field

from mpcompare.verdict.judge import clip, optimizer
from mpcompare.verdict.judge.check import Case, Check, Checks
from mpcompare.verdict.judge.counts import Count
from mpcompare.verdict.judge.drive import Drive
from mpcompare.verdict.judge.optimizer import LAST


@dataclass(frozen=True)
class TrainedUpdate:
    """The trained backend's next update, replayed from its own optimizer state."""

    drive: Drive  # the step
    # by kind of the optimizer's tensors and by parameter, the largest error over its bound after the update
    moments: dict[str, dict[str, float]] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)  # by tensor, where the optimizer counts its updates


def checks(case: Case) -> Checks:
    """Yields the checks of one update, and what the optimizer remembers after it, with the roundings of one update.

    Moments that are rounded after their use do not make this update wrong, but every later update starts from them.
    """
    trained = case.run.findings.trained
    if trained is None:
        return
    yield from clip.of_pass(case.run, LAST, trained.drive)
    yield from optimizer.of_passes(case.run, {LAST: trained.drive})
    for kind, tensors in trained.moments.items():
        for name, excess in tensors.items():
            because = f"{kind} of {name} is {excess:.2g} times as far as fp32 rounds it from what the update after "
            because += "training makes of it"
            if trained.drive.digits.get(kind, 0.0) > 0.5:
                because += ": it has the digits of 16-bit numbers"
            yield Check(f"{kind} after training", excess, 1, "moments", because, tensor=name)
