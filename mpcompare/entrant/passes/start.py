"""The pass that finds where training begins: at the initial weights, or at a checkpoint of the same task."""

import logging
from pathlib import Path

from mpcompare.entrant import going_on, resume
from mpcompare.entrant.going_on import WentOn
from mpcompare.entrant.start import Start
from mpcompare.entrant.state import Entrant, Nothing, Pass
from mpcompare.records import WENT_ON

log = logging.getLogger(__name__)


def take(entrant: Entrant) -> Pass[resume.ResumedPart | WentOn | Nothing]:
    """Needs ``checkpoint``, ``taken`` and ``setup``. Leaves ``start``."""
    yield from ()
    plan, setup, saved, recorder = entrant.plan, entrant.setup, entrant.checkpoint, entrant.recorder
    if saved is None:
        recorder.keep(0)
        entrant.start = Start(setup, None)
        return Nothing()
    goes_on = plan.resume.goes_on
    folder = Path(recorder.result[WENT_ON]["path"]) if goes_on else plan.resume.folder
    checkpoint = resume.fit(saved, resume.what_is_trained(plan, setup), setup.loss_scale, folder)
    resume.check_tensors(checkpoint, setup.model, folder)
    moves = plan.verdict.enabled and not entrant.taken
    before = going_on.before(recorder, saved.step, moves) if goes_on else None
    entrant.start = Start(setup, checkpoint, before or going_on.NOTHING)
    if before is None:
        return resume.describe(checkpoint, folder)
    log.info("taken as it is from %s" if entrant.taken else f"goes on after step {saved.step} of %s", folder)
    return WentOn({**recorder.result[WENT_ON], "step": None if entrant.taken else saved.step})
