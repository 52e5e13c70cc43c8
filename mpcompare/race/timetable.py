"""The timetable of a sweep: the stages of its entrants, done ones and others, and about how long the others take.

set-up        the network, the data, the backend with all that is built for it; mostly shared, so it is not foreseen
training      its steps
examination   the numbers of the verdict; another entrant shows how long it takes
noise         the runs in which a baseline trains again
timing        blocks in turns, up to a budget that all entrants of a race share
phases        blocks with a clock between the phases
memory        a few steps under the meter
inference     the trained network, up to a budget

Nothing here is a guess: budgets, steps that were seen, and stages of other entrants say how long a stage takes. As long
as they say nothing of a stage, all stages together are said to take at least as long as the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SET_UP, TRAINING, EXAMINATION, NOISE = "set-up", "training", "examination", "noise"
TIMING, PHASES, MEMORY, INFERENCE = "timing", "phases", "memory", "inference"

PHASE_BLOCKS = 9  # entrant/phases.py takes as many, the untimed steps included


@dataclass(frozen=True)
class RaceStage:
    """A stage of an entrant, and all that is known of its duration before it begins."""

    name: str
    steps: float = 0  # number of training steps that it takes; 0 where it is not made of them
    seconds: float | None = 0.0  # its least duration apart from steps, a budget; None where only another entrant tells


def stages(
    train_steps: float, noise_runs: float | None, timing_s: float, block_s: float, inference_s: float | None
) -> tuple[RaceStage, ...]:
    """Returns the stages of an entrant.

    Args:
        train_steps: the number of its training steps.
        noise_runs: the number of times that it trains again; None where it is not examined at all.
        timing_s: its part of the budget of timing.
        block_s: seconds of a block.
        inference_s: the budget of inference; None where there is none.
    """
    examined = noise_runs is not None
    return (
        RaceStage(SET_UP),
        RaceStage(TRAINING, steps=train_steps, seconds=block_s),  # at its end a block is tried out
        RaceStage(EXAMINATION, seconds=None if examined else 0.0),
        *((RaceStage(NOISE, steps=train_steps * noise_runs),) if noise_runs else ()),
        RaceStage(TIMING, seconds=timing_s),
        RaceStage(PHASES, steps=PHASE_BLOCKS, seconds=PHASE_BLOCKS * block_s),  # a block has at least one step
        RaceStage(MEMORY),
        *(() if inference_s is None else (RaceStage(INFERENCE, seconds=inference_s),)),
    )


@dataclass
class _Way:
    """An entrant on its way through its stages."""

    stages: Sequence[RaceStage]
    place: int = -1  # the index of its stage; -1 before the first
    since: float | None = None  # when that stage began; None where it is over
    spent: dict[str, float] = field(default_factory=dict)  # the seconds of each stage that is over
    first: float = 0.0  # the progress with which its stage began
    # a number of training steps, and the moment at which they were done; later ones show how long one takes
    pace: tuple[float, float] = (0.0, 0.0)
    share: float = 0.0  # the share of its stage that is done; 0 where that is not known
    step_s: float | None = None  # seconds of a training step; None before one was seen
    gone: bool = False  # whether it has ended, early or not

    def end_stage(self, now: float) -> None:
        """The stage is over."""
        if self.since is not None:
            self.spent[self.stages[self.place].name] = now - self.since
            if self.stages[self.place].name == TRAINING and self.step_s is None and self.pace[0] > self.first:
                self.step_s = now - self.since  # the duration of the only step
        self.since = None

    @property
    def done(self) -> int:
        """The number of stages that are over."""
        return 0 if self.place < 0 else self.place + (self.since is None)


class Timetable:
    """The stages of all entrants of a sweep.

    Args:
        stages: the stages of each entrant, by its folder: the entrants of several sweeps may share a name.
        began: the moment at which the sweep began, in seconds.
    """

    def __init__(self, stages: Mapping[Path, Sequence[RaceStage]], began: float) -> None:
        self.began = began
        self._ways = {folder: _Way(each) for folder, each in stages.items()}

    def go(self, folder: Path, stage: str, done: float, total: float, now: float) -> None:
        """An entrant is in a stage: in a new one, or, where ``stage`` is empty, in the one that it was in."""
        way = self._ways[folder]
        place = next((i for i, each in enumerate(way.stages) if each.name == stage), way.place)
        if place < 0:
            return
        if place != way.place:
            way.end_stage(now)
            way.place, way.first, way.pace = place, done, (done, now)
        way.since = now if way.since is None else way.since
        way.share = done / total if total else 0.0
        if way.stages[place].name == TRAINING and done > way.first:
            if done == way.first + 1:  # the first step builds, compiles and maps memory: it foretells no other
                way.pace = (done, now)
            else:
                way.step_s = (now - way.pace[1]) / (done - way.pace[0])

    def end_turn(self, folder: Path, gone: bool, now: float) -> None:
        """The turn of an entrant is over, and with it its stage, but for timing, which takes many turns. ``gone`` says
        whether it has ended; early, unless all of its last stage is done."""
        way = self._ways[folder]
        if not gone and way.place >= 0 and way.stages[way.place].name == TIMING:
            return
        if gone and way.place >= 0 and (way.share < 1 or way.place < len(way.stages) - 1):
            way.place, way.since = way.place - 1, None
        way.end_stage(now)
        way.gone |= gone

    def marks(self, folder: Path) -> list[tuple[str, str]]:
        """Returns each stage of an entrant with ``done``, ``now``, ``ahead``, or ``out`` where it ended before."""
        way = self._ways[folder]
        marks = ["done"] * way.done + ["now"] * (way.since is not None)
        marks += ["out" if way.gone else "ahead"] * (len(way.stages) - len(marks))
        return [(stage.name, mark) for stage, mark in zip(way.stages, marks, strict=True)]

    def remaining(self, now: float) -> "Remaining | None":
        """Returns about how long all stages still take; None before a step was seen."""
        steps_s = [way.step_s for way in self._ways.values() if way.step_s]
        if not steps_s:
            return None
        total, is_least = 0.0, False
        for way in self._ways.values():
            step_s = way.step_s or sum(steps_s) / len(steps_s)
            for place in () if way.gone else range(way.done, len(way.stages)):
                seconds = self._whole(way.stages[place], step_s)
                if seconds is None:
                    is_least, seconds = True, 0.0
                if place == way.place and way.since is not None:
                    seconds = seconds * (1 - way.share) if way.share else max(seconds - (now - way.since), 0.0)
                total += seconds
        return Remaining(total, is_least)

    def _whole(self, stage: RaceStage, step_s: float) -> float | None:
        """Returns the seconds of a whole stage: by its steps, else by other entrants, else by what is known before."""
        if stage.name == SET_UP:
            return 0.0
        if stage.steps:
            return max(stage.steps * step_s, stage.seconds or 0.0)
        shown = [way.spent[stage.name] for way in self._ways.values() if stage.name in way.spent]
        return sum(shown) / len(shown) if shown and stage.name != TIMING else stage.seconds


@dataclass(frozen=True)
class Remaining:
    """The time that a sweep still takes."""

    seconds: float
    is_least: bool = False  # whether there are stages of which nothing is known, so that it takes longer

    def __str__(self) -> str:
        """``about 2 min left``, no more exact than such an estimate is; ``at least 2 min left``."""
        size, digits, unit = self._unit
        number = max(round(self.seconds / size, digits), 10.0**-digits)
        return f"{'at least' if self.is_least else 'about'} {number:.{max(digits, 0)}f} {unit} left"

    def is_near(self, other: "Remaining") -> bool:
        """Returns whether another estimate is less than one step of the words away from this one."""
        size, digits, _ = self._unit
        return self.is_least == other.is_least and abs(self.seconds - other.seconds) < size * 10.0**-digits

    @property
    def _unit(self) -> tuple[int, int, str]:
        """The unit of the words: its seconds, the digits of a number after the point, and its name."""
        if self.seconds < 90:
            return 1, -1, "s"
        return (60, 0, "min") if self.seconds < 5400 else (3600, 1, "h")
