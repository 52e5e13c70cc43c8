"""The list of all figures."""

from collections.abc import Callable, Mapping

from matplotlib.figure import Figure

from mpcompare.report.contents import Report
from mpcompare.report.figures.dtypes import dtypes
from mpcompare.report.figures.exponents import exponents
from mpcompare.report.figures.gradient_error import gradient_error
from mpcompare.report.figures.loss import loss
from mpcompare.report.figures.memory import memory
from mpcompare.report.figures.noise import noise
from mpcompare.report.figures.phases import phases
from mpcompare.report.figures.step_time import step_time
from mpcompare.report.figures.training import training
from mpcompare.report.figures.update_ratio import update_ratio

Draw = Callable[[Report], Figure | None]  # None where there is nothing to draw

# Figures by the name of their files, in the order in which a reader wants them.
FIGURES: Mapping[str, Draw] = {
    "loss": loss,
    "step_time": step_time,
    "phases": phases,
    "memory": memory,
    "training": training,
    "gradient_error": gradient_error,
    "noise": noise,
    "exponents": exponents,
    "update_ratio": update_ratio,
    "dtypes": dtypes,
}
