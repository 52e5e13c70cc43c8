"""The checks of the verdict: each a number, a limit that is derived, and the cause where it does not hold.

Limits come from the rounding of the precision, from the errors that the reference makes itself, or from the noise that
it measured; none was chosen so that something passes.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
from scipy import special  # scipy.stats takes half a second to import

from mpcompare.records import Run
from mpcompare.report.comparable import start_of
from mpcompare.report.comparison import loss_difference
from mpcompare.verdict.judge.causes import Errors, explain, too_small
from mpcompare.verdict.judge.check import FP32, Check, Numbers
from mpcompare.verdict.judge.clipping import clip_checks
from mpcompare.verdict.judge.updates import update_checks

K = 2.0  # a run may make twice the errors of its reference: one that rounds twice as often makes 1.4 times as much
RARE = 1e-3  # such a part of what varies at random as it is believed to is beyond its limit
# In the order of their power to explain: the first that fails is the cause of what fails after it.
KINDS = (
    "dtypes",
    "policy",
    "gradients",
    "buffers",
    "clip",
    "optimizer",
    "first change",
    "later steps",
    "overflows",
    "after a skip",
    "resume",
    "timed steps",
    "run",
)


AFTER_TRAINING = "after training"


def checks(run: Run, reference: Run) -> Iterator[Check]:
    """All that can be looked at, kind by kind; of the reference itself, what needs no other."""
    mine, theirs = run.numerics or {}, reference.numerics or {}
    found = {
        "dtypes": _precision(run, mine, reference),
        "policy": _policy(mine),
        "clip": clip_checks(mine),
        "optimizer": update_checks(mine),
        "resume": _resume(mine),
        "timed steps": _timed_steps(run, mine),
    }
    if run is not reference:
        found["overflows"] = _overflows(run, reference)
        found["run"] = _run(run, reference)
        if has_gradients("first", mine, theirs):
            found["gradients"] = _gradients(
                "in the first step", mine["first"], theirs["first"], mine, theirs.get("rounding", {})
            )
        if mine.get("linear") and "first_update" in mine["first"] and "first_update" in theirs["first"]:
            found["first change"] = _first_change(mine, theirs)
        if "buffers" in mine["first"] and "buffers" in theirs["first"]:
            found["buffers"] = _buffers(mine, theirs)
        if has_gradients("last", mine, theirs):
            found["later steps"] = _gradients(AFTER_TRAINING, mine["last"], theirs["last"], mine, {}, "later steps")
        if has_gradients("overflow", mine, theirs):
            found["after a skip"] = _gradients(
                "after a skipped step",
                mine["overflow"],
                theirs["overflow"],
                mine,
                theirs.get("rounding", {}),
                "after a skip",
            )
    for kind in sorted(found, key=KINDS.index):
        yield from (replace(check, kind=kind) for check in found[kind])


def has_gradients(where: str, *numbers: Numbers) -> bool:
    return all("gradients" in n.get(where, {}) for n in numbers)


def not_finite(found: Numbers) -> list[str]:
    """The gradients of a pass that hold inf or NaN in what they are held beside, so that they are held beside nothing.

    After training that is a new backend with the same weights, which overflows as the trained one should.
    """
    return [name for name, e in found["gradients"].items() if e and not math.isfinite(e["norm"])]


def _precision(run: Run, mine: Numbers, reference: Run) -> Iterator[Check]:
    """Dtypes as observed, and as the errors show. A network whose output is not a product's may end in another dtype
    than it computes in: there the reference's is as good."""
    precision, dtypes = run.result["precision"], run.result["dtypes"]
    computed = "fp32" if precision == "tf32" else precision
    promised = {"activations": (computed,), "gradients": (computed, "fp32")}
    techniques = {"params": "no master weights", "loss": "loss"}
    for what, dtype in dtypes.items():
        expected = promised.get(what, ("fp32",))
        if what == "activations":
            expected = tuple(dict.fromkeys((*expected, reference.result["dtypes"][what])))
        because = f"{what} in {dtype}, and precision={precision} means {' or '.join(expected)}"
        yield Check(f"dtype of {what}", float(dtype not in expected), 0, techniques.get(what, "precision"), because)
    effective = mine["first"].get("effective_precision", precision)
    because = f"precision={precision}, and the gradients are those of {effective}"
    yield Check("effective precision", float(effective != precision), 0, "precision", because)


def _policy(mine: Numbers) -> Iterator[Check]:
    """The loss scale, the skipped steps, and the weights in them and before a step: exactly."""

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
            if step.get("finite_after_clip") and not step["finite"]:
                gradients += ", which clipping makes finite"
            because = f"{gradients}, and it {'says' if step['skipped'] else 'does not say'} that it skipped"
            yield Check(f"skip {name}", float(step["skipped"] != step["should_skip"]), 0, "skip", because)
            because = f"{gradients}, and the weights {'changed' if step['moved'] else 'did not change'}"
            yield Check(f"weights {name}", float(step["moved"] == step["should_skip"]), 0, "skip", because)
            because = f"weights changed {name} before the gradients of all micro-batches were there"
            yield Check(f"micro-batches {name}", float(step.get("moved_early", False)), 0, "accumulation", because)
        if last := mine.get(where, {}).get("next_scale"):
            yield scale(f"after pass {where}", last["loss_scale"], last["should_scale"])


def _overflows(run: Run, reference: Run) -> Iterator[Check]:
    """Gradients overflow where the reference's do.

    Whether a gradient near the end of fp16's range overflows is decided by its last digit, and from then on two correct
    runs differ: one step more or less of the first pass, and in training 4 standard deviations of such a count
    (Poisson) in the steps before the reference and its noise runs part. From a scale that is far too large exactly.
    """
    steps = common_steps(reference) if start_of(run) == start_of(reference) else 0
    mine, theirs = (int(r.steps["skipped"].iloc[:steps].sum()) for r in (run, reference))
    because = f"{mine} of the first {steps} training steps skipped, of {reference.name} {theirs}"
    yield Check("skipped training steps", abs(mine - theirs), 4 * math.sqrt(max(theirs, 1)), "overflow", because)
    for where, limit in (("first", 1), ("overflow", 0)):
        a, b = ([s["finite"] for s in (r.numerics or {}).get(where, {}).get("steps", [])] for r in (run, reference))
        if not (a and b):  # without loss scaling there is no pass overflow
            continue
        because = f"{a.count(False)} steps of pass {where} overflow, of {reference.name} {b.count(False)}"
        value = abs(a.count(False) - b.count(False)) if limit else float(a != b)
        yield Check(f"overflows of pass {where}", value, limit, "overflow", because)


def _limit(e: Numbers, numbers: Numbers, rounding: Numbers) -> float:
    """Of the error of a tensor: what any implementation may lose.

    That is K times the reference's error, and one more rounding of its largest element (where there are few, the
    reference's error may be small by luck). Or, where it is more, K times what one rounding of each result makes: where
    the reference keeps in fp32 what others may round, as autocast does a transformer's stream of residuals, or where
    its terms cancel, as in a bias before a batch norm. The square of such an error varies as a sum of squares of
    ``dimensions`` Gaussians does (Satterthwaite, Biometrics Bulletin 2(6), 1946), and its mean is known from a few
    samples: together they make the F distribution. And fp32 sums in another
    order, with a relative error like the root of their length (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).

    Args:
        rounding: of this tensor, ``measure.rounding.rounding_errors``; empty if it is not known.
    """
    u, once = numbers["unit_roundoff"], rounding.get("error", 0.0)
    sums = _sums(numbers) * max(e["norm"], once / u)  # relative to what is summed, which may cancel
    if once:
        dimensions = rounding["dimensions"]
        once *= math.sqrt(float(special.fdtri(dimensions, rounding["samples"] * dimensions, 1 - RARE)))
    return max(K * e["error"] + u * e["largest"], K * once) + sums


def _sums(numbers: Numbers) -> float:
    return math.sqrt(numbers["longest_sum"]) * FP32


def _gradients(
    where: str, mine: Numbers, theirs: Numbers, numbers: Numbers, rounding: Numbers, cause: str = ""
) -> Iterator[Check]:
    """Loss and gradients beside the oracle's.

    A gradient may be 0 where the oracle's is not as often as the reference's, twice, and 9 times more (Poisson, 1e-6).
    The loss is one number, which may be right by luck: 4 standard deviations beside K times the reference's error.
    """
    errors: dict[str, Errors] = {}
    overflowed = not_finite(mine) if where == AFTER_TRAINING else []
    for name, e in theirs["gradients"].items():
        limit = _limit(e, numbers, rounding.get(name, {})) if e else math.nan
        if not math.isnan(limit) and name not in overflowed:  # a reference that diverged is no measure
            errors[name] = Errors(mine["gradients"].get(name, {}), limit)
    exact = theirs["exact_loss"]
    loss_error = abs(mine["loss"] - mine["exact_loss"])
    loss_limit = K * abs(theirs["loss"] - exact) + 4 * theirs["loss_noise"] + _sums(numbers) * abs(exact)
    if not errors or math.isnan(loss_limit):
        return
    found, because = explain(errors, numbers, mine, theirs, loss_error <= loss_limit)
    if cause and found:
        because = f"those of the first step are right, and {where} {because}"
    for name, e in errors.items():
        yield Check(f"gradient {where}, {name}", e.error, e.limit, cause or found, because)
    for name in errors:
        e = theirs["gradients"][name]
        if e["norm"] <= rounding.get(name, {}).get("error", 0.0):
            continue  # it is 0 but for rounding errors, like that of a bias before a batch norm
        zeros, elements = mine["gradients"].get(name, {}).get("zeros", 0), e["elements"]
        because = f"{100 * zeros:.2g} % of the gradient of {name} {where} is 0 and should not be"
        because += too_small(numbers, mine, theirs)
        yield Check(f"zeros {where}, {name}", zeros * elements, K * e["zeros"] * elements + 9, "underflow", because)
    if where == AFTER_TRAINING and not math.isfinite(mine["exact_loss"]):
        return
    because = f"the loss {where} is {mine['loss']:.9g}, exactly {mine['exact_loss']:.9g}"
    yield Check(f"loss {where}", loss_error, loss_limit, cause or "loss", because)


def _buffers(mine: Numbers, theirs: Numbers) -> Iterator[Check]:
    """Running statistics after the first step beside the oracle's; as for gradients, but that they stay in fp32: what
    they are made of may be rounded, and they may not."""
    for name, e in theirs["first"]["buffers"].items():
        limit = _limit({**e, "largest": 0.0}, mine, theirs.get("rounding", {}).get(name, {})) if e else math.nan
        error = Errors(mine["first"]["buffers"].get(name, {}), limit)
        if not math.isnan(error.limit):
            because = f"{name} is off by {error.error / max(e['norm'], 1e-300):.1e} of its norm after the first step"
            yield Check(f"buffer {name}", error.error, error.limit, "running statistics", because)


def _resume(mine: Numbers) -> Iterator[Check]:
    """A backend that loaded another's state has it, and goes on as that one does: its state and its loss scale exactly;
    its loss and weights but for the order of sums, as each activation may be rounded once more or less.

    Gradients that differ by 8 u make updates that do, where these are linear in them. Adam's are next to ``lr`` times
    the gradient's sign: of those within 8 u of 0, about a part 8 u, the sign may turn, which is 2 lr, and the root of
    that part times 2 of their norm.
    """
    if not (found := mine.get("reload")):
        return
    if "lost" in found:
        because = f"a backend that loads a state has another one then: {', '.join(found['lost'])}"
        yield Check("state after a reload", float(len(found["lost"])), 0, "resume", because)
    a, b = found["expected"], found["found"]
    because = f"loss scale {b['loss_scale']:g} after a reload and a step, {a['loss_scale']:g} without the reload"
    yield Check("loss scale after a reload", float(a["loss_scale"] != b["loss_scale"]), 0, "resume", because)
    if math.isfinite(a["loss"]):
        because = f"the loss of the step after a reload is {b['loss']:.9g}, without the reload {a['loss']:.9g}"
        error, limit = abs(a["loss"] - b["loss"]), _reordered_loss(mine, a["loss"])
        yield Check("loss after a reload", error, limit, "resume", because)
    if math.isfinite(found["norm"]):
        part = 8 * mine["unit_roundoff"]
        limit = (part if mine.get("linear", True) else 2 * math.sqrt(part)) * found["norm"]
        because = f"weights a step after a reload are {found['error']:.1e} away from those without the reload"
        yield Check("weights after a reload", found["error"], limit, "resume", because)


def _reordered_loss(mine: Numbers, loss: float) -> float:
    """How far the same computation with other orders of sums may move a loss: 4 standard deviations of what one
    rounding of each activation does to it, and fp32 sums."""
    return 4 * mine["first"].get("loss_noise", 0.0) + _sums(mine) * abs(loss)


def _timed_steps(run: Run, mine: Numbers) -> Iterator[Check]:
    """The losses in timed blocks are those of the trained backend that was examined, at the same steps."""
    found, loss = run.result.get("timed_loss_difference"), run.result.get("timed_loss")
    if found is None or loss is None or not math.isfinite(float(loss)):
        return
    because = f"the loss of a timed step is {float(found):.1e} away from what the examined backend gives there"
    yield Check("loss of timed steps", float(found), _reordered_loss(mine, float(loss)), "timed steps", because)


def _first_change(mine: Numbers, theirs: Numbers) -> Iterator[Check]:
    """The first change of the weights beside the oracle's: as for gradients, and one rounding of the weights. That
    holds where an update is linear in the gradients. Adam divides each by the root of its square, and one next to 0
    that turns its sign changes the update by 2 lr."""
    gradients, roundings = theirs["first"].get("gradients", {}), theirs.get("rounding", {})
    clipping = _norm_error(gradients, mine, roundings)
    for name, e in theirs["first"]["first_update"].items():
        gain = e["gain"]  # the first change is the gradient times this, and the decay
        rounding = roundings.get(name, {})
        rounding = {**rounding, "error": gain * rounding["error"]} if rounding else {}
        limit = _limit(e, mine, rounding) + FP32 * e["weights"]
        limit += clipping * gain * (gradients.get(name) or {"norm": 0.0})["norm"]
        error = mine["first"]["first_update"].get(name, {"error": math.inf})["error"]
        because = f"the first change of {name} is off by {error / e['norm'] if e['norm'] else math.inf:.1e} of its norm"
        yield Check(f"first change, {name}", error, limit, "optimizer", because)


def _norm_error(gradients: Numbers, numbers: Numbers, roundings: Numbers) -> float:
    """How far the clip factor of right gradients may be from that of the oracle's, relatively: as far as their norm,
    and a norm is no further away than its vector is. 0 where nothing is clipped."""
    found = {name: e for name, e in gradients.items() if e}
    if numbers.get("clip_norm") is None or not found:
        return 0.0
    error = math.hypot(*(_limit(e, numbers, roundings.get(name, {})) for name, e in found.items()))
    if numbers["clip_norm_type"] == math.inf:
        norm = max(e["largest"] for e in found.values())
    else:
        norm = math.hypot(*(e["norm"] for e in found.values()))
    clipped = norm + error > numbers["clip_norm"]
    return error / norm if clipped and norm else 0.0


def loss_noise(reference: Run) -> np.ndarray:
    """Step by step the largest difference between the losses of any two of ``reference`` and its noise runs."""
    again = (reference.numerics or {})["noise"]
    losses = [reference.steps["loss"].to_numpy(), *(np.array(a["losses"], dtype=float) for a in again)]
    return np.max([np.abs(a - b) for a, b in combinations(losses, 2)], axis=0)


def common_steps(reference: Run, run: Run | None = None) -> int:
    """How many steps runs can be compared in, before their trajectories part.

    Differences between correct runs grow step by step. As long as they are small they grow alike, up to a factor, and
    the noise says how large they may be; once they are no longer small, every run goes its own way. Halfway in digits
    is where this is drawn: noise beyond the root of the unit roundoff, relative to the loss. A step that one skips and
    another takes parts them too. Runs that resumed from different points have none in common.

    Args:
        run: whose skipped steps count as well; without it, those of the reference and its noise runs.
    """
    numbers = reference.numerics or {}
    if run is not None and start_of(run) != start_of(reference):
        return 0
    if not numbers["noise"]:
        return len(reference.steps)
    skips = [r.steps["skipped"].to_numpy(dtype=bool) for r in (reference, run) if r is not None]
    skips += [np.array(again["skipped"], dtype=bool) for again in numbers["noise"]]
    steps = min(map(len, skips))
    skips = [skip[:steps] for skip in skips]
    loss = np.maximum.accumulate(np.abs(reference.steps["loss"].to_numpy(dtype=float)[:steps]))
    parted = ~(loss_noise(reference)[:steps] <= math.sqrt(numbers["unit_roundoff"]) * loss)
    parted |= np.any([skip != skips[0] for skip in skips], axis=0)
    return int(np.argmax(parted)) if parted.any() else steps


def _run(run: Run, reference: Run) -> Iterator[Check]:
    """Over the whole run: no further from the reference than one more correct run would be.

    The reference and its noise runs are a sample of such runs, and a small one. Their differences grow along the one
    direction that grows fastest, so their length is one number: the limit for one more is Student's t, with one degree
    of freedom for each noise run, times the standard deviation of the sample, times the root of 2, for both runs vary.
    """
    mine, theirs = run.numerics or {}, reference.numerics or {}
    if not (again := theirs["noise"]):
        return
    factor = math.sqrt(2) * float(special.stdtrit(len(again), 1 - RARE / 2))
    steps = common_steps(reference, run)
    if steps:
        losses = np.array([reference.steps["loss"][:steps], *(a["losses"][:steps] for a in again)], dtype=float)
        found, noise = loss_difference(run, reference)[:steps], float(losses.std(axis=0, ddof=1).max())
        limit = factor * noise + 4 * FP32 * float(reference.steps["loss"].abs().iloc[:steps].max())
        because = f"the loss is up to {found.max():.1e} away from that of {reference.name}, which varies by {noise:.1e}"
        yield Check("loss over the run", float(found.max()), limit, "run", because)
    if steps < len(reference.steps):
        return
    # All weights in one: of a bias with two numbers alone, runs may be close by luck.
    moved = [
        np.concatenate([m[name] for name in theirs["moved"]]) for m in (theirs["moved"], *(a["moved"] for a in again))
    ]
    noise = math.sqrt(float(np.var(moved, axis=0, ddof=1).sum()))
    distance = float(np.linalg.norm(np.concatenate([mine["moved"][name] for name in theirs["moved"]]) - moved[0]))
    rounded = math.hypot(*(e["weights"] for e in theirs["first"].get("first_update", {}).values()))
    limit = factor * noise + len(reference.steps) * FP32 * rounded
    because = f"the weights are {distance:.1e} away from those of {reference.name} after training, which vary by "
    because += f"{noise:.1e}"
    yield Check("weights after the run", distance, limit, "run", because)
