"""The layer that owns a tensor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """The owner of a tensor."""

    layer: str  # the name of the layer
    kind: str  # the class of the layer
    inside: list[str]  # the classes of the modules around it, the outermost first
    part: str  # the tensor's name in it, such as ``weight``
    place: int  # among the layers in the order of their calls; -1 for one that is no layer of its own
    after: str = ""  # the layer whose output is its input as it is; empty where there is none
    # how often the tensor is used in a step, as far as layers tell: once for each call of each of its layers, of which
    # a tied tensor has several
    uses: int = 1

    @property
    def role(self) -> str:
        """The role of the layer, if its class or the class of a module around it tells it; else an empty string."""
        if "Embedding" in self.kind:
            return "embedding"
        if "Norm" in self.kind:
            return "normalization"
        if self.kind.removesuffix("Cell") in ("RNN", "LSTM", "GRU"):
            return "recurrent layer"
        return "attention" if any("Attention" in name for name in (self.kind, *self.inside)) else ""
