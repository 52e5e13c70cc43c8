"""The pass ``again``: one step, taken twice from one state. Noise that a backend adds is seen in the bits alone, and in
some elements of each tensor.

All other steps are taken with the same numbers from torch's generators, so noise that is drawn from them is the same
each time. Here the second step gets other numbers, unless the network itself draws from the generators.
"""

from typing import Any

import torch
from torch import Tensor

from mpcompare.contract import State
from mpcompare.tasks.draws import EXAMINED
from mpcompare.tasks.task import Params
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.drive import Driver
from mpcompare.verdict.examine.new_step import begun, starts_anew
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.judge.again import Again


def after_first(subject: Subject, driver: Driver) -> Again:
    """Takes the first step again, and returns how far its gradients are apart where their bits differ. The driver, of
    the pass ``first``, has taken this step before. Only if the bits differ from then, the step is taken once more, and
    the two are compared. Nobody needs the driver's backend any more; it loads the initial weights."""
    backend, taken = driver.backend, driver.first_step
    state = starts_anew(backend, subject.examined, driver.finite.scale if driver.finite else 1.0)
    known = numerics.spreads({"loss": torch.tensor(taken.loss), **taken.grads}) if taken else {}
    second = _gradients(backend, state, subject, EXAMINED if subject.exact.drawn else EXAMINED + 1)
    is_known = known.keys() == second.keys() and all(numerics.same_bits(g, second[name]) for name, g in known.items())
    first = known if is_known else _gradients(backend, state, subject, EXAMINED)
    apart = {
        name: numerics.distance({"": g}, {"": second[name]}) / max(numerics.finite_norm({"": g}), 1e-300)
        for name, g in first.items()
        if not numerics.same_bits(g, second[name])
    }
    return Again(list(first), apart)


def _gradients(backend: Any, state: State, subject: Subject, number: int) -> Params:
    """Returns copies of the loss, and of some elements of the gradients, of a step; the step is finished."""
    backend.load_state_dict(state)
    walk = begun(subject, backend, number)
    found = {"loss": walk.loss, **backend.grads()}
    copies = numerics.spreads({name: g for name, g in found.items() if isinstance(g, Tensor)})
    walk.finish()
    return copies
