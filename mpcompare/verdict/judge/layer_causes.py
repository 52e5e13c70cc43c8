"""From wrong places of a replayed step to their cause: the place that is named, and how it is wrong."""

import math
from collections.abc import Mapping

from mpcompare.precision import FORMATS
from mpcompare.verdict.judge.buffers import cause_of
from mpcompare.verdict.judge.causes import LOST, underflows
from mpcompare.verdict.judge.check import Case
from mpcompare.verdict.judge.errors import PlaceError
from mpcompare.verdict.judge.limits import K, roundings
from mpcompare.verdict.judge.replayed import OUTPUT, Layers, as_place, percent_off, said_of

APART = K**2  # the ratio of two errors over their measures: each measure may be K times as wide as it need be


def explained(case: Case, run: Layers, excess: Mapping[str, float], where: str) -> tuple[str, str, str]:
    """Returns the cause, its sentence, and the layer or buffer at which it shows, from the first place that is wrong.
    All three are empty where no place is wrong.

    A place of backward that is far more wrong than all of forward is named first: a forward that is written in more
    operations than the layer's own may round a little more.

    Args:
        excess: for each wrong place its error, divided by the larger of one rounding and the reference's own error. The
            order is the step's: forward, backward, and then buffers. Limits are wider where samples say less.
    """
    if not excess:
        return "", "", ""
    failed = list(excess)
    forward = [at for at in failed if at.startswith(("input ", "output "))]
    backward = [at for at in failed if at.startswith("gradient ")]
    sizes = {at: math.inf if math.isnan(size) else size for at, size in excess.items()}
    of_forward, of_backward = (max((sizes[at] for at in some), default=0.0) for some in (forward, backward))
    if of_backward > APART * of_forward:
        forward = []
    at = (forward or backward or failed)[0]
    kind, _, layer = at.partition(" ")
    place = run.places[at]
    because = f"{said_of(at, where)} is {percent_off(place)} off, beyond what its roundings make"
    above = _above(case, run, failed, layer) if kind == "gradient" and layer != OUTPUT else []
    if above:
        because += f": what {' or '.join(above)} passes down"
    shows = "" if layer == OUTPUT else layer
    format = run.formats.get(at, "")
    if at in run.constants and place.error <= math.sqrt(case.run.unit_roundoff) * place.norm:
        because += f": it depends on no parameter, as positions do, and is computed in {case.run.precision}"
    if format and place.error <= math.sqrt(FORMATS[format].unit_roundoff) * place.norm:
        return "precision", f"{because} in {case.run.precision}: it is computed in {format}", shows
    if kind == "gradient" and place.error == place.norm:  # the recorded gradient is 0
        return "gradient missing", because, shows
    if kind == "gradient" and (layer == OUTPUT or not (above or f"gradient {OUTPUT}" in run.places)):
        lost = _lost(case, run, place)
        return ("underflow", f"{because}: {lost}", "") if lost else ("loss", because, "")
    if kind == "buffer":
        return cause_of(case, layer), because, shows
    if forward:
        found = _of_output(case, run, layer, place) if kind == "output" else ""
        return found or "forward pass", because, shows
    if any(_role(case, each) == "attention" and each.rpartition(".")[0] == layer.rpartition(".")[0] for each in above):
        return "attention", because, shows
    below = [each.layer for each in case.run.findings.layers.values() if each.after == layer]
    return next(filter(None, (_role(case, each) for each in below)), "") or "input gradient", because, shows


def _of_output(case: Case, run: Layers, layer: str, place: PlaceError) -> str:
    """Returns the cause of a layer's wrong output: its role, or a product whose sum has too few digits. Such a sum
    keeps half of the digits at least, and the weights' gradients, which are such sums, lose digits, too. Else none."""
    own = [name for name, each in case.run.findings.layers.items() if each.layer == layer and name in run.rounding]
    sums = [as_place(e, run, name) for name in own if (e := run.gradients.get(name))]
    short = any(each.error > roundings(case.run, each) for each in sums)
    rounded = place.error <= math.sqrt(case.run.unit_roundoff) * place.norm
    return _role(case, layer) or ("products" if short and rounded else "")


def _above(case: Case, run: Layers, failed: list[str], layer: str) -> list[str]:
    """Returns the layers that are given a layer's output as it is, or else the layer that is called next. Only layers
    with a right gradient at their own output count."""
    given = [each.layer for each in case.run.findings.layers.values() if each.after == layer]
    right = [each for each in dict.fromkeys(given) if f"gradient {each}" not in failed]
    if right:
        return right
    order = [at.partition(" ")[2] for at in run.places if at.startswith("output ")]
    after = order[order.index(layer) + 1 :] if layer in order else []
    return [each for each in after if f"gradient {each}" not in failed and each != OUTPUT][:1]


def _lost(case: Case, run: Layers, place: PlaceError) -> str:
    """Returns a clause on the gradient that has the most zeros, if the loss's gradient is no further off than small
    numbers of fp16 are; empty otherwise."""
    zeros = {name: e.zeros for name, e in run.gradients.items() if e}
    most = max(zeros, key=zeros.__getitem__, default="")
    small = place.error <= math.sqrt(case.run.unit_roundoff) * place.norm
    if not (most and small and underflows(case.run) and zeros[most] > LOST):
        return ""
    return f"{100 * zeros[most]:.2g} % of the gradient of {most} is 0 and should not be"


def _role(case: Case, layer: str) -> str:
    return next((each.role for each in case.run.findings.layers.values() if each.layer == layer), "")
