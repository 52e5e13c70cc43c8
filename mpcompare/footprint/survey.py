"""The footprints of all recipes for one network, in turn."""

from mpcompare.errors import BackendUnavailable, InputError
from mpcompare.footprint.count import Footprint, count
from mpcompare.footprint.kernels import MeasuredKernels
from mpcompare.footprint.recipes import RECIPES, FootprintRecipe
from mpcompare.footprint.subject import FootprintSubject


def survey(subject: FootprintSubject, kernels: MeasuredKernels | None = None) -> dict[FootprintRecipe, Footprint | str]:
    """Returns the footprint of each recipe, or the reason why it has none, in one line. Raises InputError where not
    even the first recipe, fp32, can take a step: the network cannot be called with these inputs."""
    footprints: dict[FootprintRecipe, Footprint | str] = {}
    for recipe in RECIPES:
        try:
            footprints[recipe] = count(recipe, subject.model, subject.task, subject.batch, kernels)
        except BackendUnavailable as error:
            footprints[recipe] = str(error)
        except Exception as error:  # anything that a network can raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if recipe is RECIPES[0]:
                raise InputError("NAME", subject.title, f"cannot take a step ({reason})") from error
            footprints[recipe] = f"cannot take a step ({reason})"
    return footprints
