"""The list of all figures."""

from collections.abc import Mapping

from mpcompare.report.figures.digits import digits_figure
from mpcompare.report.figures.dtypes import dtypes
from mpcompare.report.figures.exponents import exponents
from mpcompare.report.figures.glance import glance
from mpcompare.report.figures.gradient_error import gradient_error
from mpcompare.report.figures.guarded import Draw, guarded
from mpcompare.report.figures.loss import loss
from mpcompare.report.figures.memory import memory
from mpcompare.report.figures.noise import noise
from mpcompare.report.figures.phases import phases
from mpcompare.report.figures.step_time import step_time
from mpcompare.report.figures.training import training
from mpcompare.report.figures.update_ratio import update_ratio

# Figures by the name of their files, in the order in which a reader wants them.
FIGURES: Mapping[str, Draw] = {
    "glance": guarded(glance),
    "loss": guarded(loss),
    "step_time": guarded(step_time),
    "phases": guarded(phases),
    "memory": guarded(memory),
    "training": guarded(training),
    "gradient_error": guarded(gradient_error),
    "noise": guarded(noise),
    "exponents": guarded(exponents),
    "update_ratio": guarded(update_ratio),
    "dtypes": guarded(dtypes),
    "digits": guarded(digits_figure),
}
