"""One entrant that takes its turns alone, in this process."""

import time
from collections.abc import Sequence

from mpcompare.race.orders import Order, Progress, Turn, Turns
from mpcompare.race.progress import Board
from mpcompare.race.timetable import RaceStage, Timetable
from mpcompare.race.turns import Display, Rules, race


def alone(turns: Turns, rules: Rules, stages: Sequence[RaceStage]) -> None:
    """Runs one entrant in this process, with a progress bar where there is a terminal."""
    with Board([_Local.name], Timetable({_Local.name: stages}, time.monotonic()), lines=False) as board:
        race([_Local(turns, board)], rules, board)


class _Local:
    """An entrant in this process."""

    name = "run"

    def __init__(self, turns: Turns, display: Display) -> None:
        self.turns, self.display = turns, display

    def turn(self, order: Order | None) -> Turn | None:
        """Takes one turn; returns None where the entrant is gone."""
        try:
            event = self.turns.send(order)
            while isinstance(event, Progress):
                self.display.progress(self.name, event)
                event = next(self.turns)
        except StopIteration:
            return None
        return event
