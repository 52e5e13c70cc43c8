"""Linear layers and convolutions, which no sample of roundings computes again.

A forced layer has the same operands in each replay. In these layers only the results are rounded: an output, the
gradients of the parameters, and the gradient that is passed down. So a result in a sample is the exact one, rounded
once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpcompare.stored import Stored
from mpcompare.verdict.examine.forced.arithmetic import Point
from mpcompare.verdict.examine.forced.call import At
from mpcompare.verdict.examine.forced.own_products import PRODUCTS, is_torchs
from mpcompare.verdict.examine.forced.record import Record
from mpcompare.verdict.examine.forced.roundings import Roundings


@dataclass
class KnownLayers:
    """The layers of products that no sample computes, with the gradients that they pass down in the exact replay."""

    # network, record: the network and the record of the exact replay
    network: nn.Module
    record: Record
    dtype: torch.dtype  # the dtype of the samples
    # by part of the step and layer the number of results in the exact replay that a precision rounds
    results: Mapping[tuple[str, str], int]
    # is given each point of such a layer whose result in a sample is the exact one, rounded once
    sample: Callable[[Roundings, Point], None]
    # The roundings of the samples. A convolution is among these layers only where it rounds nothing but its output.
    roundings: Roundings
    params: dict[str, list[str]] = field(default_factory=dict)  # by layer the parameters whose gradients it makes

    def __post_init__(self) -> None:
        self._names = {id(p): name for name, p in self.network.named_parameters()}
        self._back = Stored()

    def __contains__(self, layer: object) -> bool:
        return layer in self.params

    def keep(self, point: Point, back: Tensor) -> None:
        """Keeps the gradient that a layer passes down in the exact replay, if an operator makes each of its results."""
        module, calls = self.network.get_submodule(point.layer), self.record.calls[point.layer]
        if not (isinstance(module, PRODUCTS) and is_torchs(module) and len(calls) == 1) or calls[0].rectified:
            return
        if isinstance(module, nn.modules.conv._ConvNd) and self.roundings.convolves_in is not torch.float32:
            return
        trained = [self._names[id(p)] for p in module.parameters() if p.requires_grad]
        rounded = [self.results.get((part, point.layer)) for part in ("forward", "backward")]
        if rounded == [1, 1 + len(trained)]:
            self.params[point.layer] = trained
            self._back[point.layer] = back.to(self.dtype)

    def passed(self, layer: str) -> Tensor:
        """Returns a copy of the gradient that a layer passes down in the exact replay."""
        return self._back[layer].clone()

    def drop_sums(self, sources: Mapping[str, set[str]]) -> None:
        """Drops the layers with a parameter whose gradient is a sum.

        Args:
            sources: by parameter the layers that its gradient comes from.
        """
        self.params = {layer: own for layer, own in self.params.items() if all(sources[n] == {layer} for n in own)}

    def forward(self, at: At) -> None:
        """Takes a sample of the output of a layer."""
        self.sample(self.roundings, Point("output", at.name))

    def backward(self, at: At, arriving: Tensor) -> Tensor:
        """Takes samples of the gradients of a layer's parameters. Returns the gradient that the layer passes down."""
        for name in self.params[at.name]:
            self.sample(self.roundings, Point("parameter", name))
        passed = self.roundings.round_(self.passed(at.name))
        at.replay.tell(Point("back", at.name), passed, passed, passed.dtype)
        return passed
