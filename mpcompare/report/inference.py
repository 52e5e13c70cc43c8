"""The table of inference: a row for each run and each way in which its trained network was applied.

``inference.csv`` and the console show it. A way is a precision and how the network got there, as in ``autocast bf16``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpcompare.fields import WayFields
from mpcompare.records import finite
from mpcompare.report.columns import TEXT, Column, named, number, percentiles, recorded
from mpcompare.report.comparison import Comparison, Entry


@dataclass(frozen=True)
class InferenceRow:
    """A run and one way of inference with its network."""

    comparison: Comparison
    entry: Entry
    way: str
    repeated: bool  # whether the costs are those of an earlier run: a race measures them once

    @property
    def result(self) -> WayFields:
        return ways(self.entry)[self.way]

    @property
    def recorded(self) -> dict[str, Any]:
        """The result as it stands in ``result.json``."""
        return finite(self.result)

    @property
    def time_ratio(self) -> float | None:
        """Latency of this way over the latency in fp32; None where either is missing."""
        fp32, own = ways(self.entry).get("fp32"), self.result.latency_ms
        return own / fp32.latency_ms if fp32 and fp32.latency_ms and own else None

    @property
    def way_in_words(self) -> str:
        """The way, and why it is unavailable if it is."""
        return f"{self.way} (unavailable: {reason})" if (reason := self.result.unavailable) is not None else self.way

    def shows(self, column: "Column[InferenceRow]") -> bool:
        """Whether a table for readers shows the column: repeated costs stand in the rows of the earlier run alone."""
        return not self.repeated or column.name in SCORES


def ways(entry: Entry) -> dict[str, WayFields]:
    """Returns the results by way; empty where none was tried."""
    return entry.run.result.inference.ways if entry.ok and entry.run.result.inference else {}


def batch_size(entry: Entry) -> int | None:
    """Returns the number of samples in a batch of inference; None where no way was tried."""
    return entry.run.result.inference.batch_size if entry.run.result.inference else None


def measured(comparison: Comparison) -> list[Entry]:
    """Returns the runs whose networks were applied in any way."""
    return [entry for entry in comparison.entries if ways(entry)]


def rows_of(comparison: Comparison) -> list[InferenceRow]:
    entries = measured(comparison)
    repeated = zip(entries, _repeated(entries), strict=True)
    return [InferenceRow(comparison, entry, way, again) for entry, again in repeated for way in ways(entry)]


def lines(comparison: Comparison) -> list[str]:
    """Returns a line that says why the costs of some runs are not shown, if they are not."""
    if not any(row.repeated for row in rows_of(comparison)):
        return []
    return ["inference: time and memory do not depend on who trained, and a race measures them once"]


def _repeated(entries: Sequence[Entry]) -> list[bool]:
    """Returns for each run whether its costs are those of an earlier one."""
    costs = [[result.latency_ms for result in ways(entry).values()] for entry in entries]
    return [latencies in costs[:place] for place, latencies in enumerate(costs)]


COLUMNS: tuple[Column[InferenceRow], ...] = (
    Column("comparison", TEXT, "The title of the comparison.", lambda row: row.comparison.title),
    Column("run", TEXT, "The folder of the run.", lambda row: row.entry.run.name),
    Column("label", TEXT, "The label of the run in its comparison.", lambda row: row.entry.label),
    Column("way", TEXT, "The precision, and how the network got there.", lambda row: row.way),
    Column("batch_size", "1", "The number of samples in a batch.", lambda row: batch_size(row.entry)),
    recorded("test_accuracy", "1", "The accuracy on held-out samples.", heading="test acc.", text=number(".4f")),
    recorded("test_loss", "1", "The loss on held-out samples.", heading="test loss", text=number(".5f")),
    recorded(
        "latency_ms", "ms", "The time of a batch, median of the timed ones.", heading="ms/batch p50", text=number(".4g")
    ),
    recorded("latency_ms_p20", "ms", "The time of a batch, 20th percentile of the timed ones."),
    recorded("latency_ms_p80", "ms", "The time of a batch, 80th percentile of the timed ones."),
    percentiles("latency_ms", "The time of a batch, 20th to 80th percentile of the timed ones."),
    recorded(
        "samples_per_s", "1/s", "The samples of a batch over its median time.", heading="samples/s", text=number(".4g")
    ),
    recorded(
        "peak_memory_bytes",
        "bytes",
        "The measured peak of memory, weights and batch included.",
        heading="peak MB",
        text=number(".4g", per=1e6),
    ),
    recorded(
        "weight_bytes",
        "bytes",
        "The memory of parameters and buffers.",
        heading="weights MB",
        text=number(".4g", per=1e6),
    ),
    recorded("unavailable", TEXT, "The reason why the network cannot be applied in this way."),
    Column(
        "time_vs_fp32",
        "1",
        "The time of a batch in this way over the time in fp32: smaller is faster.",
        lambda row: row.time_ratio,
        heading="time / fp32",
        text=number(".2f"),
    ),
)
# The columns of a console, in their order there.
SHOWN = named(
    COLUMNS,
    (
        *("test_accuracy", "test_loss", "latency_ms", "latency_ms_p20_p80", "time_vs_fp32", "samples_per_s"),
        *("peak_memory_bytes", "weight_bytes"),
    ),
)
SCORES = ("test_accuracy", "test_loss")  # the columns that depend on who trained
