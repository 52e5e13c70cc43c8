"""One job of Hydra's: an entrant competes, and whatever ends its run early is in its record."""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mpcompare.command.compiled import compiled
from mpcompare.command.faults import WRONG_INPUT, known_fault
from mpcompare.command.going_on import how_to_go_on, is_sweep
from mpcompare.command.plan import plan_of, stages_of
from mpcompare.command.record import record_at_start
from mpcompare.errors import InputError, fail, first_line
from mpcompare.interrupt import interruptible, uninterrupted
from mpcompare.numerals import short
from mpcompare.race.orders import Order, Progress, Turn, Turns
from mpcompare.race.progress import Board
from mpcompare.race.timetable import RaceStage, Timetable
from mpcompare.race.turns import Rules, race

# torch takes seconds to import, so it is imported where a run begins: --help and --cfg stay quick.

log = logging.getLogger("mpcompare")


def run(
    cfg: DictConfig,
    drive: Callable[[Turns], None] | None = None,
    shared: Path | None = None,
    at_start: Mapping[str, Any] | None = None,
) -> None:
    """Runs one job: Hydra's task function. In a sweep a job that fails is a record, and the others go on.

    Args:
        cfg: the composed configuration.
        drive: lets the entrant take its turns; None: alone, in this process.
        shared: the folder in which the entrants of a race share values; None: with nobody.
        at_start: the first entries of its record, as its race was planned; None: as they are here.
    """
    fresh = drive is not None or "torch" not in sys.modules  # no backend has been in this process
    from mpcompare.records import RESULT, STEPS, WENT_ON, RunRecorder

    folder = Path(HydraConfig.get().runtime.output_dir)
    is_planned = drive is not None and (folder / RESULT).exists()
    recorder = RunRecorder(folder, record_at_start(cfg) if at_start is None else dict(at_start), is_planned)
    try:
        from mpcompare.command.clean import process_of_job
        from mpcompare.entrant.entrant import compete
        from mpcompare.shared import Shared

        if drive is None and is_sweep(cfg):
            how = "hydra/launcher=side_by_side" if HydraConfig.get().mode == RunMode.MULTIRUN else "-m"
            raise InputError("resume", cfg.resume, f"is the folder of a sweep: name one of its runs, or all by {how}")
        recorder.result["config"] = OmegaConf.to_container(cfg, resolve=True)
        alone_here = compiled() if drive is None else nullcontext()
        with interruptible(), alone_here, process_of_job(cfg) if fresh else nullcontext() as clean:
            plan = plan_of(cfg, goes_on=WENT_ON in recorder.result)
            with closing(compete(plan, recorder, Shared(shared), clean)) as turns:
                (drive or partial(alone, rules=plan.measure, stages=stages_of(cfg, plan.backend, 1)))(turns)
    except KeyboardInterrupt:
        with uninterrupted():
            if recorder.result["status"] == "running":
                recorder.add(status="interrupted", error="interrupted")
        raise KeyboardInterrupt(how_to_go_on(folder)) from None
    except (Exception, SystemExit) as error:
        known, wrong = known_fault(error), isinstance(error, WRONG_INPUT) and not (folder / STEPS).exists()
        try:
            recorder.add(status="failed", error=known or first_line(error), wrong_input=wrong)
        except InputError:  # a full disk, say: without a record the report would not miss this job
            fail(known or str(error))
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            log.error(known or first_line(error), exc_info=None if known else error, extra={"can_wait": wrong})
        elif known:
            fail(known)
        else:
            raise
        return
    result = recorder.result
    log.info(
        "%s %s (%s) on %s: %s ms a step, final loss %.4f. Written to %s",
        *(result[key] for key in ("backend", "precision", "engine", "dataset")),
        short(result["step_ms_p50"]),
        result["final_loss"],
        folder,
    )


def alone(turns: Turns, rules: Rules, stages: Sequence[RaceStage]) -> None:
    """Runs one entrant in this process, with a progress bar where there is a terminal."""
    timetable = Timetable({(here := Path()): stages}, time.monotonic())
    with Board({_Local.name: here}, timetable, lines=False) as board:
        race([_Local(turns, board)], rules, board)


class _Local:
    """An entrant in this process."""

    name = "run"

    def __init__(self, turns: Turns, board: Board) -> None:
        self.turns, self.board = turns, board

    def turn(self, order: Order | None) -> Turn | None:
        """Takes one turn; returns None where the entrant is gone."""
        try:
            event = self.turns.send(order)
            while isinstance(event, Progress):
                self.board.progress(self.name, event)
                event = next(self.turns)
        except StopIteration:
            return None
        return event
