"""An entrant in a process of its own, as the launcher sees it: its turns, and every way in which it can end."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, context
from pathlib import Path

from hydra import version
from hydra.types import HydraContext

from mpcompare import records
from mpcompare.command import entrant_main
from mpcompare.command.belongings import Belongings
from mpcompare.command.forks import server_has_died, start
from mpcompare.command.sweep import Job
from mpcompare.errors import InputError
from mpcompare.race.orders import Order, Progress, Train, Turn
from mpcompare.race.progress import Board

GRACE_S = 3.0  # between being asked to stop and being killed
OUTPUT = "output.log"  # holds what an entrant's process prints apart from its log


class Process:
    """An entrant of a race.

    Attributes:
        cause: the cause of its end, where the launcher ended it.
        unrecorded: the error because of which its record could not be completed.
    """

    def __init__(
        self,
        job: Job,
        hydra: HydraContext,
        task: Callable[..., None],
        board: Board,
        processes: context.BaseContext,
        own: Belongings,
    ) -> None:
        """Starts the process, one of the belongings ``own`` of its sweep."""
        self.job, self.name, self.board, self.own = job, job.name, board, own
        self.cause: str | None = None
        self.unrecorded: InputError | None = None
        self.oom_kills = _oom_kills()
        self.pipe, far_end = processes.Pipe()
        arguments = (far_end, hydra, task, job.config, version.getbase(), job.folder / OUTPUT)
        self.process = processes.Process(  # type: ignore[attr-defined]
            target=entrant_main.main, args=arguments, name=self.name
        )
        start(self.process)
        far_end.close()

    def turn(self, order: Order | None) -> Turn | None:
        """Takes one turn; returns None where the process is gone."""
        if order is not None:
            with suppress(OSError):  # gone: the loop below sees it
                self.pipe.send(order)
        while True:
            if self._is_silent(meanwhile=self.board.refresh if isinstance(order, Train) else lambda: None):
                limit = f"{self.job.silence_limit_s:g} s (hydra.launcher.silence_limit_s)"
                self.cause = f"hung: no sign of life for {limit}"
                self.process.kill()
                self.end()
                return None
            try:
                event = self.pipe.recv() if self.pipe.poll() else None
            except (EOFError, OSError):
                event = None
            if event is None:
                self.end()
                return None
            if isinstance(event, Turn):
                return event
            if isinstance(event, Progress):
                self.board.progress(self.name, event)
            else:
                self.board.say(self.name, *event)

    def _is_silent(self, meanwhile: Callable[[], None]) -> bool:
        """Waits until the entrant says something or is gone; True if the job's ``silence_limit_s`` pass without
        either. ``meanwhile`` is called about once a second; it may use a core for a moment."""
        waited = 0.0
        # In slices: a child of the entrant may keep the pipe open when the entrant is gone. And time in which Ctrl-Z
        # stopped both is no silence.
        while waited < self.job.silence_limit_s:
            slice_s = min(1.0, self.job.silence_limit_s - waited)
            if connection.wait([self.pipe, self.process.sentinel], slice_s) or not self.process.is_alive():
                return False
            waited += slice_s
            meanwhile()
        return True

    def ask_to_stop(self) -> None:
        """Interrupts it like Ctrl-C; a process that is done already does not notice."""
        if self.process.is_alive():
            self.cause = "interrupted"
            self.process.terminate()

    def end(self, deadline: float | None = None) -> None:
        """Waits for the process to end, kills it if it has not by ``deadline``, and completes its record."""
        self.process.join(GRACE_S if deadline is None else max(deadline - time.monotonic(), 0))
        if self.process.is_alive():
            self.cause = self.cause or "killed by the launcher: it had closed its pipe, and did not end"
            self.process.kill()
            self.process.join()
        self.own.end_orphans(self.name)
        try:
            output = self.job.folder / OUTPUT
            printed = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
            if not printed:
                output.unlink(missing_ok=True)
            cause = self.cause or self._cause_of_death(printed)
            if records.conclude(self.job.folder, self.job.record_at_start, cause):
                self.own.forget()
                self.board.line(f"{self.name}: {cause}")
        except (OSError, ValueError) as error:
            said = f"cannot complete the record ({error})"
            self.unrecorded = InputError("hydra output folder", self.job.folder, said)

    def _cause_of_death(self, printed: Sequence[str]) -> str:
        if server_has_died():
            return "killed, or cut off: the process of which all entrants are forks was killed"
        code = self.process.exitcode or 0
        named = {each.value: each.name for each in signal.Signals}
        cause = f"killed by {named.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            out_of_memory = _oom_kills() > self.oom_kills
            cause += ": out of memory" + (", as the kernel was meanwhile" if out_of_memory else ", or by hand")
        elif printed:
            cause += f": {printed[-1]}"
        return cause


def _oom_kills() -> int:
    """Returns the number of processes that the kernel has killed for lack of memory; 0 where it does not say."""
    with suppress(OSError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0
