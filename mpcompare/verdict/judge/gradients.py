"""Of a backend that shows no layers: are the first gradients near to the oracle's?

- *Whose.* A backend that shows no layers, or calls its network with other rows than the batch has. Where layers and
  loss are seen, `layers` takes the place of this check.
- *Value.* The distance of each gradient of the first step from the oracle's. The part of this error that points along
  the gradient. The zeros of the gradient. The loss.
- *Limit.* The limit of a gradient. For the part along the gradient it is 2 times amp's part, or the roundings' part
  times Student's t for 1e-3. Rounding to nearest makes numbers as often larger as smaller; cutting digits off adds up
  there.
- *Zeros.* A count. The gradient of a tied weight is a sum, and so are all gradients where a backend computes a batch in
  parts. Two numbers of equal size and opposite signs cancel, in a share 2 u of the elements.
- *Loss.* 2 times amp's error, and 4 standard deviations of the loss under one rounding of each activation, whose
  variance is u^2/3 sum (dz z)^2.
"""

import math
from collections.abc import Mapping

from mpcompare.verdict.judge.causes import Pass, Symptoms, TensorError, explain, too_small
from mpcompare.verdict.judge.check import Case, Check, Checks, Examined
from mpcompare.verdict.judge.drive import Drive, Gradients
from mpcompare.verdict.judge.errors import RoundingErrors, known
from mpcompare.verdict.judge.limits import K, signed_limit, sum_error, tensor_limit

FIRST = "in the first step"


def checks(case: Case) -> Checks:
    """Yields checks of the pass ``first`` where no forced replay sees all of the step: the oracle of the whole network
    sees less."""
    layers = case.run.findings.replays.get("first")
    if layers is None or not layers.loss_is_replayed:
        run, reference = case.run.findings, case.reference.findings
        yield from of_drives(case, FIRST, run.first, reference.first, run.rounding, "")


def not_finite(gradients: Gradients) -> list[str]:
    """Returns the gradients that hold inf or NaN in a new backend with the same weights, too, as they should."""
    return [name for name, e in gradients.gradients.items() if e and not math.isfinite(e.norm)]


def of_drives(
    case: Case, where: str, run: Drive | None, reference: Drive | None, roundings: RoundingErrors, cause: str
) -> Checks:
    """Yields the checks of a pass of the run and its reference. A ``cause`` is the cause of all checks that fail."""
    if run and run.finite and reference and reference.finite:
        yield from gradient_checks(case, where, Pass(run.finite, reference.finite, run), roundings, cause)


def gradient_checks(
    case: Case, where: str, step: Pass, roundings: RoundingErrors, cause: str, first_is_right: bool = True
) -> Checks:
    """Yields the checks of the gradients and the loss of one step. There are none for the reference itself, and none
    where either shows no gradients.

    The reference's loss is one number, whose error may be small by luck. So its limit is 4 standard deviations more.

    Args:
        roundings: the rounding error of each tensor.
        cause: the cause of all checks that fail; empty where the errors tell it.
        first_is_right: whether the gradients of the first step are right where these are not.
    """
    run, reference, exact = step.own, step.reference, step.reference.exact_loss
    errors = errors_of(case.run, step, roundings)
    if case.is_reference or not run.gradients or not errors:
        return
    loss_error = abs(run.loss - run.exact_loss)
    loss_limit = K * abs(reference.loss - exact) + 4 * reference.loss_noise + sum_error(case.run) * abs(exact)
    loss_is_known = math.isfinite(run.exact_loss) and not math.isnan(loss_limit)
    explained, because = explain(Symptoms(case.run, errors, step, loss_error <= loss_limit or not loss_is_known))
    if where != FIRST and explained and first_is_right:
        because = f"the gradients of the first step are right, and {where} {because}"
    for name, e in errors.items():
        yield Check(f"gradient {where}", e.error, e.limit, cause or explained, because, tensor=name)
    real = [name for name in errors if not vanishes(name, reference, roundings)]
    yield from _zeros(case.run, where, step, real)
    yield from _signed({name: errors[name] for name in real}, where, cause or explained, because)
    if loss_is_known:
        because = f"the loss {where} is {run.loss:.9g}, exactly {run.exact_loss:.9g}"
        yield Check(f"loss {where}", loss_error, loss_limit, cause or "loss", because)


def _signed(errors: Mapping[str, TensorError], where: str, cause: str, because: str) -> Checks:
    """Yields the check of each error's part along the gradient. It has a cause of its own where nothing else failed."""
    for name, e in errors.items():
        if e.of is None or e.signed_limit is None:
            continue
        part = abs(e.of.slope - 1)
        alone = f"the gradient of {name} {where} is {e.of.slope:.5g} times what it should be, which rounding to "
        alone += "nearest hardly makes: errors of one sign, as of numbers that are cut off"
        yield Check(f"signed error {where}", part, e.signed_limit, cause or "rounding", because or alone, tensor=name)


def errors_of(run: Examined, step: Pass, roundings: RoundingErrors) -> dict[str, TensorError]:
    """Returns the error and the limit of each gradient. A reference that diverged is no measure."""
    overflowed, errors = not_finite(step.own), {}
    for name, e in step.reference.gradients.items():
        rounding = roundings.get(name)
        limit = tensor_limit(run, e, rounding) if e else math.nan
        if e and not math.isnan(limit) and name not in overflowed:
            errors[name] = TensorError(step.own.gradients.get(name), limit, signed_limit(run, e, rounding))
    return errors


def vanishes(name: str, reference: Gradients, roundings: RoundingErrors) -> bool:
    """Returns whether a gradient is 0 but for rounding errors, like the gradient of a bias before a batch norm."""
    e, rounding = reference.gradients[name], roundings.get(name)
    return e is not None and e.norm <= (rounding.error if rounding else 0.0)


def _zeros(run: Examined, where: str, step: Pass, names: list[str]) -> Checks:
    """Yields checks of the elements that are 0 where the oracle's are not. Between two powers of two 16 bits hold
    1 / (2 u) numbers, so two of one size and of opposite signs cancel in a share 2 u of all cases; sums in fp32 do not.
    The number of zeros varies as Poisson's distribution does: 4 standard deviations, and 9 where they are few (1e-6).
    """
    replay = run.findings.replays.get("first")
    in_parts = replay is not None and not replay.as_given
    for name in names:
        e, own = known(step.reference.gradients[name]), step.own.gradients.get(name)
        zeros = own.zeros if own else 0
        because = f"{100 * zeros:.2g} % of the gradient of {name} {where} is 0 and should not be"
        because += too_small(run, step)
        layer = run.findings.layers.get(name)
        cancel = 2 * run.unit_roundoff * e.elements if in_parts or (layer and layer.uses > 1) else 0.0
        limit = K * e.zeros * e.elements + cancel + 4 * math.sqrt(cancel) + 9
        yield Check(f"zeros {where}", zeros * e.elements, limit, "underflow", because, tensor=name)
