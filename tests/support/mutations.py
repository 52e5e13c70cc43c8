"""Mutations of a correct step in any network. Which does the forced replay see, and does it name the layer?"""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.foreign import Network
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.verdict.examine.forced.passes import layers_of_first_step
from mpcompare.verdict.examine.layers import layers
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import Findings, Recipe
from mpcompare.verdict.judge.check import Case, Check, Examined
from mpcompare.verdict.judge.drive import Drive, Gradients
from mpcompare.verdict.judge.dtypes import checks as dtype_checks
from mpcompare.verdict.judge.layers import checks as layer_checks
from mpcompare.verdict.judge.replayed import Layers

PLACES = 5  # places of each mutation in each network
SEEN = 0.5  # the share of a tensor's norm that roundings may make: above it a mutation is no larger than roundings


@dataclass(frozen=True)
class Mutation:
    """A change of one tensor's gradient (``spoil``), or of one layer (``patch``).

    Attributes:
        fits: whether it can be made of a layer.
    """

    name: str
    spoil: Callable[[Tensor], Tensor] | None = None
    patch: Callable[[nn.Module, torch.dtype], None] | None = None
    fits: Callable[[nn.Module], bool] = lambda _: True


def _other_format(layer: nn.Module, dtype: torch.dtype) -> None:
    forward, other = layer.forward, torch.float16 if dtype is torch.bfloat16 else torch.bfloat16

    def changed(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=other):
            return forward(x).to(dtype)

    layer.forward = changed


def _norm_in_16_bits(layer: Any, dtype: torch.dtype) -> None:
    batch = isinstance(layer, nn.modules.batchnorm._NormBase)

    def changed(x: Tensor) -> Tensor:
        wanted, x = x.dtype, x.to(dtype)
        over = [d for d in range(x.dim()) if d != 1] if batch else [-1]
        centred = x - x.mean(over, keepdim=True)
        y = centred / (centred.square().mean(over, keepdim=True) + layer.eps).sqrt()
        shape = [1, -1, *[1] * (x.dim() - 2)] if batch else [-1]
        y = y * layer.weight.to(dtype).view(shape) + layer.bias.to(dtype).view(shape)
        return y.to(wanted)

    layer.forward = changed


def _detached(layer: nn.Module, _: torch.dtype) -> None:
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs).detach()


def _dropped(layer: nn.Module, _: torch.dtype) -> None:
    forward = layer.forward
    layer.forward = lambda x, *args, **kwargs: forward(x.detach(), *args, **kwargs)


NORMS = ("BatchNorm2d", "LayerNorm")  # norms of any library; others norm other dimensions, or do more


def _multiplies(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, nn.Conv2d))


MUTATIONS = (
    Mutation("negated", spoil=lambda g: -g),
    Mutation("halved", spoil=lambda g: 0.5 * g),
    Mutation("swapped", spoil=lambda g: g.flatten().flip(0).view(g.shape)),
    Mutation("zero", spoil=torch.zeros_like),
    Mutation("other 16-bit format", patch=_other_format, fits=_multiplies),
    Mutation("norm in 16 bits", patch=_norm_in_16_bits, fits=lambda layer: type(layer).__name__ in NORMS),
    Mutation("detached output", patch=_detached, fits=_multiplies),
    Mutation("dropped input gradient", patch=_dropped, fits=_multiplies),
)  # fmt: skip


class Mutated(Amp):
    """``amp`` with a mutation at one place."""

    def __init__(self, *args: Any, mutation: Mutation, place: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mutation, self.place = mutation, place
        if mutation.patch:
            mutation.patch(self.model.get_submodule(place), self.compute_dtype)

    def unscale(self) -> None:
        super().unscale()
        if self.mutation.spoil:
            p = dict(self.model.named_parameters())[self.place]
            p.grad = self.mutation.spoil(p.grad)


def subject_of(network: Network, precision: str, make: Callable[..., Any]) -> Subject:
    task, data = network.task, network.dataset
    model = task.new_model(0, torch.device("cpu"))
    rows = slice(0, task.batch_size)
    scaling: LossScale = DynamicLossScale() if precision == "fp16" else NoLossScale()
    batches = [[(data.x_train[rows], data.y_train[rows])]]
    return Subject(
        make_backend=lambda model, scaling: make(model, task, precision, scaling), model=model, scaling=scaling,
        precision=PRECISIONS[precision], task=task, batches=lambda: iter(batches),
    )  # fmt: skip


def layers_of(subject: Subject, name: str) -> Examined:
    """Returns the step of a subject, as far as the forced replay and the observed dtypes tell."""
    found = layers_of_first_step(subject)
    assert found is not None
    x, y = subject.first_batch[0]
    backend: Any = subject.make_backend(subject.model, subject.scaling)
    dtypes = backend.module_dtypes(x, y)
    order = list(dict.fromkeys(at.partition(" ")[2] for at in found.places))
    of_tensors, longest_sum = layers(subject.network(), order, x[:4], len(x))
    findings = Findings(
        precision=subject.precision.name, recipe=Recipe(len(x)), longest_sum=longest_sum,
        layers=of_tensors, first=Drive(),
        last=Gradients(0.0, 0.0, 0.0), replays={"first": found},
    )  # fmt: skip
    return Examined(name, subject.precision.name, backend.dtypes(), findings, None, layers=dtypes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Mutant:
    """A mutation at one place, and what is seen of it.

    Attributes:
        failed: the checks that fail, in the order of a verdict.
        effect: the largest error that it makes at any place, in units of the roundings there.
    """

    mutation: str
    place: str
    failed: Sequence[Check]
    effect: float

    @property
    def named(self) -> bool:
        """Whether the sentence of the verdict names the layer, or the tensor."""
        name = rf"(?<![\w.]){re.escape(self.place)}(?!\w)"
        return bool(self.failed) and re.search(name, self.failed[0].because) is not None


def mutated(network: Network, precision: str, most: int = PLACES, seed: int = 0) -> Iterator[Mutant]:
    """Yields mutations of each kind in random places of a network, at most so many."""
    chosen = random.Random(f"{seed} {network.name} {precision}")
    right = layers_of(subject_of(network, precision, Amp), "amp")
    found = right.findings.replays["first"]
    model = network.task.new_model(0, torch.device("cpu"))
    tensors = [
        n for n, e in found.gradients.items() if e and found.rounding[n].error < SEEN * e.norm and e.elements > 1
    ]
    for mutation in MUTATIONS:
        places = tensors if mutation.spoil else [
            n for n, m in model.named_modules() if mutation.fits(m) and _seen(found, n)
        ]  # fmt: skip
        if mutation.name == "detached output":
            places = places[:-1]  # behind the last place backward would have nothing to begin with
        if mutation.name == "dropped input gradient":
            places = places[1:]  # the input of the first place needs no gradient
        for place in chosen.sample(places, min(most, len(places))):
            make = lambda *args, m=mutation, p=place: Mutated(*args, mutation=m, place=p)  # noqa: E731
            run = layers_of(subject_of(network, precision, make), mutation.name)
            case = Case(run, right)
            checks = [*dtype_checks(case), *layer_checks(case)]  # in the order of a verdict
            failed = [check for check in checks if not check.passed]
            yield Mutant(mutation.name, place, failed, _effect(run.findings.replays["first"], found))


def _seen(found: Layers, layer: str) -> bool:
    place = found.places.get(f"gradient {layer}")
    return place is not None and place.rounding < SEEN * place.norm


def _effect(run: Layers, right: Layers) -> float:
    far = [0.0]
    for at, place in run.places.items():
        if at not in right.places or place.far > 1.2 * right.places[at].far:
            far.append(place.far)
    for name, rounding in run.rounding.items():
        own, other = run.gradients.get(name), right.gradients.get(name)
        if own is None or other is None:
            far.append(math.inf)
        elif own.error > 1.2 * other.error:
            far.append(own.error / max(rounding.error, 1e-300))
    return max(far)
