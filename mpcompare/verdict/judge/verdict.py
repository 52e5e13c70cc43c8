"""Does a run compute the same as its reference? docs/verdict.md says why these checks, and how good they are."""

from dataclasses import dataclass, field
from functools import partial

from mpcompare.verdict.judge import promises
from mpcompare.verdict.judge.check import Case, Check, Examined, listed
from mpcompare.verdict.judge.drive import Drive
from mpcompare.verdict.judge.gradients import not_finite
from mpcompare.verdict.judge.kinds import all_checks
from mpcompare.verdict.judge.layers import doubt
from mpcompare.verdict.judge.limits import COARSEST
from mpcompare.verdict.judge.sight import Sight, said, sight
from mpcompare.verdict.judge.trajectories import common_steps, draws_alike
from mpcompare.verdict.judge.word import Word

GRADIENTS = "gradients in the first step"
TRAINING = "training (no noise was measured)"
RESUMED = "training (it began at another point: resume)"
OTHER_MASKS = "training (it draws other random numbers, such as masks of dropout)"


@dataclass(frozen=True)
class Verdict:
    """A verdict on one run.

    Attributes:
        word: ``same``; ``not seen`` (no check failed, and the checks would not have found a large error);
            ``within noise`` (its gradients cannot be seen, the run cannot be told from its reference's);
            ``differs``; ``differs as declared`` (in what the backend promises, and in nothing else); ``reference``
            (others are compared with it; it passed what needs no other); ``not comparable``; ``not examined``
            (it or its reference: ``verdict.enabled=false``; or a pass stopped with an error, and no check failed).
        cause: of ``differs``, the cause of the first check that failed; of ``differs as declared``, the promises that
            are seen to be kept; of ``not seen``, the layers and tensors; of ``not comparable``, the field; of ``not
            examined``, the passes that stopped.
        because: the cause in a sentence; of ``reference``, why it is in doubt, such as the place where it is
            itself beyond roundings; empty where it is not.
        unchecked: the parts that could not be looked at.
        detail: a few words that belong to the cause, such as the precision in which a run computes; may be empty.
        sees: a sentence on the smallest error that would have been found; may be empty.
    """

    word: Word
    cause: str = ""
    because: str = ""
    reference: str | None = None
    checks: list[Check] = field(default_factory=list, repr=False)  # too many for repr
    unchecked: list[str] = field(default_factory=list)
    detail: str = ""
    sees: str = ""

    @property
    def said(self) -> Word:
        """The word that is shown: a reference that is beyond roundings itself, or not finite, is in doubt."""
        return Word.IN_DOUBT if self.word is Word.REFERENCE and self.because else self.word

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.word}: {self.cause}{detail}" if self.cause else str(self.said)


def judge(run: Examined, reference: Examined) -> Verdict:
    """Returns the verdict on ``run``; both may be the same one."""
    case = Case(run, reference)
    checks = list(all_checks(case))
    unchecked = [] if case.is_reference else _unchecked(case)
    verdict = partial(Verdict, reference=reference.name, checks=checks, unchecked=unchecked)
    failed = next((check for check in checks if not check.passed), None)
    if failed:
        return verdict(Word.DIFFERS, failed.cause, failed.because, detail=failed.detail)
    if stopped := run.findings.stopped:
        because = "; ".join(f"the pass {each} stopped with {error}" for each, error in stopped.items())
        return verdict(Word.NOT_EXAMINED, ", ".join(stopped), because)
    if never := _never_finite(run.findings.first):
        word, cause = (Word.REFERENCE, "") if case.is_reference else (Word.NOT_COMPARABLE, "gradients")
        return verdict(word, cause, never)
    if seen := sight(case):
        verdict = partial(verdict, sees=f"an error of {said(seen.resolution)} in a gradient would have been found")
    if case.is_reference:
        return verdict(Word.REFERENCE, because=doubt(run))
    if seen and not seen.enough:
        return verdict(Word.NOT_SEEN, *_blind(run, seen))
    kept = promises.kept(run)
    if GRADIENTS not in unchecked:
        return verdict(Word.DIFFERS_AS_DECLARED if kept else Word.SAME, ", ".join(kept))
    if TRAINING in unchecked or kept:
        return verdict(Word.NOT_COMPARABLE, "gradients", "neither gradients nor noise are known", unchecked=[])
    if RESUMED in unchecked:
        because = "its gradients are not known, and training began at another point"
        return verdict(Word.NOT_COMPARABLE, "resume", because, unchecked=[])
    return verdict(Word.WITHIN_NOISE)


def _never_finite(first: Drive) -> str:
    """Returns a sentence on a run whose first batch has finite gradients at no loss scale, as where its network divides
    by a number that 16 bits round to 0; empty where they are finite in a step."""
    if not first.steps or any(step.finite for step in first.steps):
        return ""
    scales = [step.loss_scale for step in first.steps]
    tried = f" at loss scales from {scales[0]:g} to {scales[-1]:.2g}" if len(set(scales)) > 1 else ""
    return f"the gradients of the first batch are inf or NaN{tried}, so nothing is known of a step"


def _blind(run: Examined, seen: Sight) -> tuple[str, str]:
    """Returns what is not seen, and a sentence on it."""
    if seen.not_flagged:
        return "planted errors", f"an error that was planted is not flagged: {'; '.join(seen.not_flagged)}"
    every = listed(seen.blind)
    share = f"{100 * seen.share:.3g} % of the numbers of the gradients are seen"
    layers = "" if "first" in run.findings.replays else "no layers are seen, and "
    hides = f"{layers}an error of {100 * COARSEST:g} % may hide in {every}"
    return every, f"{hides}: one rounding of each result, or the reference's own error, is as large; {share}"


def _unchecked(case: Case) -> list[str]:
    """Returns what could not be looked at, in words."""
    run, reference = case.run.findings, case.reference.findings
    missing = []
    for what, passes in {
        GRADIENTS: (run.first, reference.first),
        "gradients after a skipped step": (run.overflow, reference.overflow),
        "gradients after training": (run.last, reference.last),
    }.items():
        replayed = what == GRADIENTS and "first" in run.replays  # with the random numbers that the step drew
        if any(passes) and not all(each and each.gradients for each in passes) and not replayed:
            missing.append(what)
    if run.last.gradients and run.trained is None:
        missing.append("the update after training")
    hidden = {"each layer by itself": run.hidden["layers"]} if "layers" in run.hidden else run.hidden
    missing += [f"{what} ({why})" for what, why in hidden.items()]
    if overflowed := not_finite(run.last):
        missing.append(f"gradients after training that overflow ({listed(overflowed)})")
    # An exponential that overflows there, or a root of 0. Which of them another right run has cannot be told.
    if "sharp" in reference.replays and "first" in run.replays and not {"sharp"} & {*run.replays, *run.hidden}:
        missing.append("layers at sharp weights, where gradients are inf or NaN")
    missing += [f"declared, and nothing shows it: {words}" for words in promises.unseen(case.run)]
    if promises.change_training(case.run):
        return [*missing, "training (it differs as declared)"]
    if case.run.start != case.reference.start:
        return [*missing, RESUMED]
    if not draws_alike(case.run, case.reference):
        return [*missing, OTHER_MASKS]
    if not reference.noise:
        return [*missing, TRAINING]
    steps = common_steps(case.reference, case.run)
    if steps < len(case.reference.steps):
        first = case.reference.steps["step"][steps]
        missing.append(f"training from step {first} on, where correct runs part")
    return missing
