"""The names of the phases of a training step, in their order; contract.py says what each does."""

from typing import Literal, get_args

WHOLE_STEP: Literal["whole step"] = "whole step"  # stands for all of them where a backend's step is one piece
Phase = Literal["forward", "backward", "unscale", "clip", "step", "update", "whole step"]
PHASES: tuple[Phase, ...] = get_args(Phase)[:-1]
