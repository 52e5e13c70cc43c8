"""The network, the first batch and torch, which a backend shares with the replays of its steps. If the backend changes
them, its steps and the replays change alike."""

from mpcompare.precision import Precision
from mpcompare.verdict.examine.attempts import Attempts
from mpcompare.verdict.examine.exact_values import ExactValues, Problem, of_batch, of_network
from mpcompare.verdict.examine.numerics import sketch
from mpcompare.verdict.examine.oracle import exact_step
from mpcompare.verdict.examine.subject import Subject

ROWS = 4
FAR = 2.0**-24  # an error that float64 does not make


def written(subject: Subject, attempts: Attempts) -> list[str] | None:
    """Returns the names of what a backend changed; None where no fingerprints were taken before it was made."""
    if not subject.lent:
        return None
    now = {**of_network(subject.model), **of_batch(subject.first_batch)}
    patched = bool(attempts.take("torch", patches_torch, subject.exact_values, subject.precision))
    return [name for name, before in subject.lent.items() if now[name] != before] + ["torch"] * patched


def patches_torch(values: ExactValues, precision: Precision) -> bool:
    """Returns whether an exact step of a few rows has other gradients in this process than in a process in which no
    backend has been, if there is such a process."""
    if values.clean is None:
        return False
    there = values.once(f"few-rows-{precision.name}", _few_rows, precision)
    here = _few_rows(values.problem, precision)
    pairs = [(a, b) for name, sketched in there.items() for a, b in zip(sketched, here[name], strict=True)]
    return bool(sum((a - b) ** 2 for a, b in pairs) > FAR**2 * sum(a**2 for a, _ in pairs))


def _few_rows(problem: Problem, precision: Precision) -> dict[str, list[float]]:
    """Returns the gradients of a few rows as sketches."""
    x, y = problem.batch[0]
    step = exact_step(problem.network, problem.loss_fn, [(x[:ROWS], y[:ROWS])], precision)
    return {"loss": [step.loss], **sketch(step.grads)}
