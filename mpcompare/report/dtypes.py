"""The table of dtypes: a row for each layer of each run, as observed in one step; and the differences in words.

``dtypes.csv`` and a figure show it. A layer has a dtype in each of several roles,
which :meth:`mpcompare.contract.Backend.module_dtypes` explains.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpcompare.fields import LOSS
from mpcompare.report.columns import OF_RUN, TEXT, Column
from mpcompare.report.comparison import Comparison, Entry, Row

ROLES = {
    "master": "The dtype of the weight that the optimizer updates.",
    "weight": "The dtype of the weight that the layer holds.",
    "input": "The dtype of the tensors that the layer is given.",
    "computes": "The dtype of the operands of the layer's own operators in forward.",
    "output": "The dtype of the tensors that the layer hands on.",
    "gradient": "The dtype of the gradient of the loss by the output.",
    "backward": "The dtype of the operands of the layer's own operators in backward.",
}
FORWARD = ("master", "weight", "input", "computes", "output")
Layers = Mapping[str, Mapping[str, str]]  # by the layer's name: its class under "kind", and its dtypes by ROLES


@dataclass(frozen=True)
class DtypesRow(Row):
    """A layer of a run; ``""`` is the whole network."""

    layer: str


def layers_of(entry: Entry) -> Layers:
    """Returns the dtypes of each layer; empty where none were observed."""
    return entry.run.result.module_dtypes or {}


def expected_of(entry: Entry) -> Layers:
    """Returns the dtypes of each layer of the baseline; empty where there is none, or none were observed."""
    return (entry.baseline.result.module_dtypes if entry.baseline else None) or {}


def observed(comparison: Comparison) -> list[Entry]:
    """Returns the runs of which dtypes were observed."""
    return [entry for entry in comparison.entries if layers_of(entry)]


def rows_of(comparison: Comparison) -> list[DtypesRow]:
    return [DtypesRow(comparison, entry, layer) for entry in observed(comparison) for layer in layers_of(entry)]


def _observed(name: str, meaning: str) -> Column[DtypesRow]:
    return Column(name, TEXT, meaning, lambda row: layers_of(row.entry)[row.layer].get(name))


COLUMNS: tuple[Column[DtypesRow], ...] = (
    *OF_RUN,
    Column("layer", TEXT, "The name of the layer in its network.", lambda row: row.layer or "(model)"),
    _observed("kind", "The class of the layer."),
    *(_observed(name, meaning) for name, meaning in ROLES.items()),
)


def classes(entries: Sequence[Entry]) -> dict[str, str]:
    """Returns the class of each layer, in the order of the run that shows most layers, the loss last."""
    by_layer: dict[str, str] = {}
    for entry in sorted(entries, key=lambda e: -len(layers_of(e))):
        for layer, dtypes in layers_of(entry).items():
            by_layer.setdefault(layer, dtypes["kind"])
    return dict(sorted(by_layer.items(), key=lambda item: item[0] == LOSS))


def differing(entry: Entry, layer: str) -> list[str]:
    """Returns the roles, among roles that both show, in which a layer's dtype is not the baseline's."""
    dtypes, expected = layers_of(entry).get(layer), expected_of(entry).get(layer)
    if not dtypes or not expected:
        return []
    return [role for role in ROLES if dtypes[role] != expected[role] and "-" not in (dtypes[role], expected[role])]


def _differences(entry: Entry) -> str:
    """Returns the dtypes of forward that are not the baseline's, with the classes of layers; or ``""``."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for layer, dtypes in layers_of(entry).items():
        for role in differing(entry, layer):
            if role in FORWARD:
                text = f"{role} {dtypes[role]} instead of {expected_of(entry)[layer][role]}"
                counts.setdefault((role, text), Counter())[dtypes["kind"]] += 1
    return "; ".join(
        f"{text} in {', '.join(name if n == 1 else f'{n} {name}' for name, n in by_class.items())}"
        for (_, text), by_class in sorted(counts.items(), key=lambda item: FORWARD.index(item[0][0]))
    )


def lines(comparison: Comparison) -> list[str]:
    """Returns a line for each run whose dtypes in forward are not those of its baseline in the same precision."""
    return [
        f"{entry.label} compared with {comparison.label(entry.baseline)}: {text}"
        for entry in observed(comparison)
        if entry.baseline
        and entry.baseline.result.precision == entry.run.result.precision
        and (text := _differences(entry))
    ]
