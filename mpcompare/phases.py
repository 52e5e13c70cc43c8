"""The names of the phases of a training step, in their order; contract.py says what each does."""

PHASES = ("forward", "backward", "unscale", "clip", "step", "update")
WHOLE_STEP = "whole step"  # stands for all of them where a backend's step is one piece
