"""The defects of a loop that was seen. Each has a cause, a place and a sentence."""

from collections.abc import Iterator, Mapping

from mpcompare.watching.defects_of_layers import of_formats, of_gradients
from mpcompare.watching.defects_of_steps import of_idle, of_repeats, of_skipped, of_step
from mpcompare.watching.defects_of_updates import of_loss_scale, of_masters, of_rounded_weights, of_updates
from mpcompare.watching.examining import Replayed, Updates
from mpcompare.watching.judged import Defect
from mpcompare.watching.looking import Look
from mpcompare.watching.powers import of_terms
from mpcompare.watching.sense import of_sense
from mpcompare.watching.steps import Sum


def defects_of(look: Look, sums: Mapping[Sum, Replayed], updates: Mapping[str, Updates]) -> list[Defect]:
    """Returns all defects, each cause at each place once. ``facts_of`` has the same arguments."""
    found: dict[tuple[str, str], Defect] = {}
    for defect in _all(look, sums, updates):
        found.setdefault((defect.cause, defect.place), defect)
    return list(found.values())


def _all(look: Look, sums: Mapping[Sum, Replayed], updates: Mapping[str, Updates]) -> Iterator[Defect]:
    yield from of_formats(look)
    yield from of_loss_scale(look)
    wrong = list(of_gradients(look, sums))
    yield from wrong or of_terms(look, sums)
    for number, taken in enumerate(look.taken, start=1):
        yield from of_step(look, number, taken)
    yield from of_idle(look)
    yield from of_skipped(look.taken)
    yield from of_repeats(look.taken)
    yield from of_rounded_weights(look.taken)
    yield from of_masters(look)
    if look.sums.clipped_early:
        because = f"gradients are clipped ({look.sums.clipped_early}) before backward has made any, and not after"
        yield Defect("clip", "", because)
    if look.sums.clipped_late and look.attached.is_alone:  # else the clip may be for another optimizer
        because = f"gradients are clipped ({look.sums.clipped_late}) after the step that used them, and not before"
        yield Defect("clip", "", because)
    if look.sums.kept_bad and look.steps.scaler is None:
        because = (
            f"the gradients hold inf or NaN where they are clipped ({look.sums.kept_bad}), no step uses them, and "
        )
        yield Defect("accumulation", "", because + "nobody clears them: later backward passes add to them")
    yield from of_updates(look, updates)
    for name, update in updates.items():
        yield from of_sense(look, name, update)
