"""The checks of the verdict: each a number, a limit that is derived, and the cause where it does not hold.

Limits come from the rounding of the precision, from the errors that the reference makes itself, or from the noise that
it measured; none was chosen so that something passes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from mpcompare.records import Run
from mpcompare.report.comparison import loss_difference
from mpcompare.report.judge.causes import Errors, explain, too_small

K = 2.0  # a run may make twice the errors of its reference: one that rounds twice as often makes 1.4 times as much
FP32 = 2.0**-24  # unit roundoff
# In the order of their power to explain: the first that fails is the cause of what fails after it.
KINDS = (
    "dtypes",
    "policy",
    "gradients",
    "updates",
    "first update",
    "later steps",
    "overflows",
    "after a skip",
    "run",
)


@dataclass(frozen=True)
class Check:
    """Something that was looked at.

    Attributes:
        kind: one of ``KINDS``.
        name: what, and of which tensor.
        value, limit: it passes where ``value <= limit``; NaN does not pass.
        cause: what is wrong where it fails, in a word or two; docs/verdict.md lists them.
        because: the same in a sentence, with its numbers.
    """

    name: str
    value: float
    limit: float
    cause: str
    because: str
    kind: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


Numbers = dict[str, Any]


def checks(run: Run, reference: Run) -> Iterator[Check]:
    """All that can be looked at, kind by kind; of the reference itself, what needs no other."""
    mine, theirs = run.numerics or {}, reference.numerics or {}
    found = {"dtypes": _precision(run, mine), "policy": _policy(mine), "updates": _updates(mine)}
    if run is not reference:
        found["overflows"] = _overflows(run, reference)
        found["run"] = _run(run, reference)
        if has_gradients("first", mine, theirs):
            found["gradients"] = _gradients("in the first step", mine["first"], theirs["first"], mine)
        if "first_update" in mine["first"] and "first_update" in theirs["first"]:
            found["first update"] = _first_update(mine, theirs)
        if has_gradients("last", mine, theirs):
            found["later steps"] = _gradients("after training", mine["last"], theirs["last"], mine, "later steps")
        if has_gradients("overflow", mine, theirs):
            found["after a skip"] = _gradients(
                "after a skipped step", mine["overflow"], theirs["overflow"], mine, "after a skip"
            )
    for kind in sorted(found, key=KINDS.index):
        yield from (replace(check, kind=kind) for check in found[kind])


def has_gradients(where: str, *numbers: Numbers) -> bool:
    return all("gradients" in n.get(where, {}) for n in numbers)


def _precision(run: Run, mine: Numbers) -> Iterator[Check]:
    """Dtypes as observed, and as the errors show."""
    precision, dtypes = run.result["precision"], run.result["dtypes"]
    computed = "fp32" if precision == "tf32" else precision
    promised = {"activations": (computed,), "gradients": (computed, "fp32")}
    techniques = {"params": "no master weights", "loss": "loss"}
    for what, dtype in dtypes.items():
        expected = promised.get(what, ("fp32",))
        because = f"{what} in {dtype}, and precision={precision} means {' or '.join(expected)}"
        yield Check(f"dtype of {what}", float(dtype not in expected), 0, techniques.get(what, "precision"), because)
    effective = mine["first"].get("effective_precision", precision)
    because = f"precision={precision}, and the gradients are those of {effective}"
    yield Check("effective precision", float(effective != precision), 0, "precision", because)


def _policy(mine: Numbers) -> Iterator[Check]:
    """The loss scale, the skipped steps, and the weights in them: exactly."""

    def scale(name: str, found: object, expected: object) -> Check:
        because = f"loss scale {found:g} {name}, where the policy says {expected:g}"
        return Check(f"loss scale {name}", float(found != expected), 0, "loss scale", because)

    wrong = mine["policy"] or {"step": "every", "loss_scale": 1.0, "should_scale": 1.0}
    yield scale(f"in training step {wrong['step']}", wrong["loss_scale"], wrong["should_scale"])
    for where in ("first", "overflow"):
        for number, step in enumerate(mine.get(where, {}).get("steps", []), start=1):
            name = f"in step {number} of pass {where}"
            yield scale(name, step["loss_scale"], step["should_scale"])
            gradients = f"{'finite' if step['finite'] else 'inf or NaN in the'} gradients {name}"
            because = f"{gradients}, and it {'says' if step['skipped'] else 'does not say'} that it skipped"
            yield Check(f"skip {name}", float(step["skipped"] != step["should_skip"]), 0, "skip", because)
            because = f"{gradients}, and the weights {'changed' if step['moved'] else 'did not change'}"
            yield Check(f"weights {name}", float(step["moved"] == step["should_skip"]), 0, "skip", because)
        if last := mine.get(where, {}).get("next_scale"):
            yield scale(f"after pass {where}", last["loss_scale"], last["should_scale"])


def _overflows(run: Run, reference: Run) -> Iterator[Check]:
    """Gradients overflow where the reference's do: in training, and from a scale that is too large."""
    mine, theirs = (set(r.steps.loc[r.steps["skipped"], "step"]) for r in (run, reference))
    because = f"{len(mine)} training steps skipped, of {reference.name} {len(theirs)}"
    yield Check("skipped training steps", len(mine ^ theirs), 0, "overflow", because)
    for where in ("first", "overflow"):
        a, b = ([s["finite"] for s in (r.numerics or {}).get(where, {}).get("steps", [])] for r in (run, reference))
        if not (a and b):  # without loss scaling there is no pass overflow
            continue
        because = f"{a.count(False)} steps of pass {where} overflow, of {reference.name} {b.count(False)}"
        yield Check(f"overflows of pass {where}", float(a != b), 0, "overflow", because)


def _limit(e: Numbers, numbers: Numbers) -> float:
    """Of the error of a tensor, from the reference's: K times that, and what any implementation may lose.

    That is one more rounding of its largest element (where there are few, the reference's error may be small by luck),
    and fp32 sums in another order, with a relative error like the root of their length (Higham and Mary, SIAM J. Sci.
    Comput. 41(5), 2019).
    """
    return K * e["error"] + numbers["unit_roundoff"] * e["largest"] + _sums(numbers) * e["norm"]


def _sums(numbers: Numbers) -> float:
    return math.sqrt(numbers["longest_sum"]) * FP32


def _gradients(where: str, mine: Numbers, theirs: Numbers, numbers: Numbers, cause: str = "") -> Iterator[Check]:
    """Loss and gradients beside the oracle's.

    A gradient may be 0 where the oracle's is not as often as the reference's, twice, and 9 times more (Poisson, 1e-6).
    The loss is one number, which may be right by luck: 4 standard deviations beside K times the reference's error.
    """
    errors: dict[str, Errors] = {}
    for name, e in theirs["gradients"].items():
        limit = _limit(e, numbers) if e else math.nan
        if not math.isnan(limit):  # a reference that diverged is no measure
            errors[name] = Errors(mine["gradients"].get(name, {}), limit)
    exact = theirs["exact_loss"]
    loss_error = abs(mine["loss"] - mine["exact_loss"])
    loss_limit = K * abs(theirs["loss"] - exact) + 4 * theirs["loss_noise"] + _sums(numbers) * abs(exact)
    if not errors or math.isnan(loss_limit):
        return
    found, because = explain(errors, numbers, mine, theirs)
    if cause and found:
        because = f"those of the first step are right, and {where} {because}"
    for name, e in errors.items():
        yield Check(f"gradient {where}, {name}", e.error, e.limit, cause or found, because)
    for name in errors:
        e = theirs["gradients"][name]
        zeros, elements = mine["gradients"].get(name, {}).get("zeros", 0), e["elements"]
        because = f"{100 * zeros:.2g} % of the gradient of {name} {where} is 0 and should not be"
        because += too_small(numbers, mine, theirs)
        yield Check(f"zeros {where}, {name}", zeros * elements, K * e["zeros"] * elements + 9, "underflow", because)
    because = f"the loss {where} is {mine['loss']:.9g}, exactly {mine['exact_loss']:.9g}"
    yield Check(f"loss {where}", loss_error, loss_limit, cause or "loss", because)


def _updates(mine: Numbers) -> Iterator[Check]:
    """Each update beside ``w - lr v`` in fp32, in units of what its roundings allow."""
    for where in ("first", "overflow"):
        for number, update in enumerate(mine.get(where, {}).get("updates", []), start=1):
            for name, e in update.items():
                cause, because = "update", f"the update of {name} is {e['slope']:.6g} times lr v"
                if e["short"] > 0.5:
                    cause = "no master weights"
                    because = f"{name} has the digits of a 16-bit number; {e['lost']:.1%} of its updates are lost"
                yield Check(f"update {number} of pass {where}, {name}", e["excess"], 1, cause, because)


def _first_update(mine: Numbers, theirs: Numbers) -> Iterator[Check]:
    """The first update beside the oracle's: the gradient's limit times lr, and one rounding of the weights."""
    for name, e in theirs["first"]["first_update"].items():
        limit = _limit(e, mine) + FP32 * e["weights"]
        error = mine["first"]["first_update"][name]["error"]
        because = f"the first update of {name} is off by {error / e['norm'] if e['norm'] else math.inf:.1e} of its norm"
        yield Check(f"first update, {name}", error, limit, "update", because)


def loss_noise(reference: Run) -> np.ndarray:
    """Step by step the largest difference between the losses of any two of ``reference`` and its noise runs."""
    again = (reference.numerics or {})["noise"]
    losses = [reference.steps["loss"].to_numpy(), *(np.array(a["losses"], dtype=float) for a in again)]
    return np.max([np.abs(a - b) for a, b in combinations(losses, 2)], axis=0)


def _run(run: Run, reference: Run) -> Iterator[Check]:
    """Over the whole run: no further from the reference than K times as far as correct runs are from each other."""
    mine, theirs = run.numerics or {}, reference.numerics or {}
    if not (again := theirs["noise"]):
        return
    found = loss_difference(run, reference)
    steps = len(found)
    noise = float(loss_noise(reference)[:steps].max())
    limit = K * noise + 4 * FP32 * float(reference.steps["loss"].abs().max())
    if not math.isfinite(limit):  # correct runs may diverge too
        return
    because = f"the loss is up to {found.max():.1e} away from that of {reference.name}, noise is {noise:.1e}"
    yield Check("loss over the run", float(found.max()), limit, "run", because)
    # All weights in one: of a bias with two numbers alone, runs may be close by luck.
    moved = [
        np.concatenate([m[name] for name in theirs["moved"]]) for m in (theirs["moved"], *(a["moved"] for a in again))
    ]
    noise = max(float(np.linalg.norm(a - b)) for a, b in combinations(moved, 2))
    distance = float(np.linalg.norm(np.concatenate([mine["moved"][name] for name in theirs["moved"]]) - moved[0]))
    rounded = math.hypot(*(e["weights"] for e in theirs["first"].get("first_update", {}).values()))
    limit = K * noise + steps * FP32 * rounded
    because = f"the weights are {distance:.1e} away from those of {reference.name} after training, noise is {noise:.1e}"
    yield Check("weights after the run", distance, limit, "run", because)
