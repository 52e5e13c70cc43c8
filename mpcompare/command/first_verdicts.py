"""The first verdicts of a race, said while its timing has not begun or goes on."""

import logging
from collections.abc import Sequence

from omegaconf import OmegaConf

from mpcompare.command.sweep import Job
from mpcompare.errors import InputError
from mpcompare.race.progress import Board

log = logging.getLogger(__name__)


class FirstVerdicts:
    """The verdicts on the entrants of a race that have been examined; each is said once, as soon as it stands.

    Args:
        jobs: those of the race, in the order of its turns.
        board: shows their lines.
    """

    def __init__(self, jobs: Sequence[Job], board: Board) -> None:
        self.jobs, self.board = jobs, board
        self.trained: list[str] = []
        self.said: set[str] = set()

    def add(self, name: str) -> None:
        """Says the verdicts that one more entrant makes possible. What goes wrong here costs the race nothing: the
        report says it in the end."""
        from mpcompare.report.first import first_verdicts  # pandas and scipy are slow to import

        self.trained.append(name)
        folders = {job.name: job.folder for job in self.jobs}
        waiting = list(folders)[list(folders).index(name) + 1 :]
        config = self.jobs[0].config
        baseline, allow = (OmegaConf.select(config, f"report.{key}") for key in ("baseline", "allow"))
        try:
            lines = first_verdicts(folders, self.trained, waiting, str(baseline), allow or ())
        except InputError:
            return
        except Exception as error:
            log.warning("no first verdict: %s: %s", type(error).__name__, error)
            return
        for run, line in lines.items():
            if run not in self.said:
                self.board.line(line)
        self.said |= set(lines)
