"""Does each training step move what it should?

- *Value.* How far each training step moves 4096 elements of each tensor, and how many of them have 16-bit digits then.
- *Limit of moves.* A skipped step moves none. Any other step moves each tensor that moves in all correct runs. The
  logarithm of a move over amp's is compared with the noise of such logarithms, by Student's t.
- *Limit of 16-bit digits.* They come at most 2 times as often as in amp. Of two Poisson counts the sum is known, so the
  limit is a quantile of the negative binomial distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpcompare.verdict.judge import promises
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined
from mpcompare.verdict.judge.limits import FP32, K
from mpcompare.verdict.judge.trajectories import common_steps, noise_factor

HARDLY = 1e-6  # the share of pairs of counts of correct runs that are further apart
DIGITS = 1e-4  # the error of a ratio of two numbers that are recorded with five digits


@dataclass(frozen=True)
class Moves:
    """The distance that each step of training moves some elements of the weights, the same ones in every run."""

    steps: list[float]  # the norm of the change of all of them, step by step
    tensors: dict[str, list[float]]  # the norm of each parameter's change; only the first steps where training is long
    weights: dict[str, float]  # the largest norm that these elements of each parameter had
    short: list[int]  # step by step, how many elements other than 0 have no more digits than the compute dtype


def checks(case: Case) -> Checks:
    """Yields checks of the steps before runs part, and of the skipped ones."""
    run, reference = case.run.findings.moves, case.reference.findings.moves
    if run is None:
        return
    yield _skipped(case.run, run)
    again = [each.moves for each in case.reference.findings.noise]
    if case.is_reference or reference is None or not again or promises.kept(case.run):
        return
    taken = ~case.reference.steps["skipped"].to_numpy(dtype=bool)[: common_steps(case.reference, case.run)]
    if taken.any():
        yield _every_tensor(case, run, [reference, *again], taken)
        yield _digits(case, run, reference, taken)


def _skipped(run: Examined, moves: Moves) -> Check:
    """A skipped step leaves every weight bit for bit as it is."""
    rows = zip(run.steps["step"], run.steps["skipped"], moves.steps, strict=False)
    wrong = [number for number, skips, far in rows if skips and far]
    because = f"training step {wrong[0] if wrong else 0} says that it skipped, and weights changed"
    return Check("weights in skipped training steps", float(len(wrong)), 0, "skip", because)


def _every_tensor(case: Case, run: Moves, correct: Sequence[Moves], taken: np.ndarray) -> Check:
    """Looks for tensors that stand still in a step which moves them in every correct run.

    Updates that are all rounded away have a norm of at most u times the norm of the weights. An update may be lost if
    this norm is as close to the reference's, by their logarithms, as the noise allows for one more correct run. So an
    update that is only a little larger than rounding errors may be lost.
    """
    factor, numbers = noise_factor(case.reference), case.reference.steps["step"].to_numpy()
    value, because = 0.0, "every step that is not skipped moves every tensor"
    for name, norms in correct[0].tensors.items():
        steps = min(len(norms), len(taken))
        found = np.array([each.tensors[name][:steps] for each in correct], dtype=float)
        own = np.array(run.tensors.get(name, []), dtype=float)[:steps]
        moves = taken[:steps] & np.isfinite(found).all(axis=0) & (found > 0).all(axis=0)
        still = moves & (own == 0)
        if not still.any():
            continue
        noise = float(np.log(found[:, moves]).std(axis=0, ddof=1).max())
        lost = max(FP32 * run.weights[name], 2.0**-149)
        ratios = np.where(still, np.log(np.maximum(found[0], lost) / lost), 0.0)
        worst = int(np.argmax(ratios))
        if (share := float(ratios[worst]) / max(factor * noise, DIGITS)) > value:
            value, times = share, int(still.sum())
            because = f"training step {numbers[worst]} leaves {name} as it is, which moves by {found[0][worst]:.1e} in "
            because += f"{case.reference.name} ({times} such {'step' if times == 1 else 'steps'})"
    return Check("every training step moves every tensor", value, 1, "update left out", because)


def _digits(case: Case, run: Moves, reference: Moves, taken: np.ndarray) -> Check:
    """Looks for steps that leave more weights with the digits of 16-bit numbers than the reference's steps do.

    If the rates of two Poisson counts are K to 1, the number of events of the one before so many events of the other
    has a negative binomial distribution (Przyborowski and Wilenski, Biometrika 31, 1940).
    """
    from scipy import special

    own, beside = (np.array(each.short[: len(taken)], dtype=float)[taken] for each in (run, reference))
    over = own - np.ceil(special.nbdtrik(1 - HARDLY, beside + 1, 1 / (K + 1)))
    worst = int(np.argmax(over))
    number = case.reference.steps["step"].to_numpy()[: len(taken)][taken][worst]
    because = f"training step {number} leaves {own[worst]:.0f} of some weights with the digits of 16-bit numbers, in "
    because += f"{case.reference.name} {beside[worst]:.0f}"
    value, limit = float(own[worst]), float(own[worst] - over[worst])
    return Check("digits after training steps", value, limit, "no master weights", because)
