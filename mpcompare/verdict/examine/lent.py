"""The network and the batches, which are lent to backends: whoever writes into them changes the task of all passes."""

from collections.abc import Mapping

from torch import nn

from mpcompare.contract import Batches
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.task import buffers_of, params_of

Lent = Mapping[str, str]  # by name a fingerprint of what is lent


def of_network(model: nn.Module) -> Lent:
    """Returns the fingerprint of a network with its initial weights; to be taken before any backend is made."""
    return {"network": fingerprint({**params_of(model), **buffers_of(model)})}


def of_batch(batch: Batches) -> Lent:
    """Returns the fingerprint of the first batch, which every backend is given; to be taken before any step."""
    named = {f"{name}{number}": t for number, (x, y) in enumerate(batch) for name, t in (("x", x), ("y", y))}
    return {"batch": fingerprint(named)}


def written(lent: Lent, model: nn.Module, batch: Batches) -> list[str]:
    """Returns the names of what is not any more what it was when it was lent."""
    now = {**of_network(model), **of_batch(batch)}
    return [name for name, before in lent.items() if now[name] != before]
