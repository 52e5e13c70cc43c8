"""The table of inference: a row for each run and each way in which its trained network was applied.

``inference.csv`` and the console show it. A way is a precision and how the network got there, as in ``autocast bf16``.
"""

from dataclasses import dataclass
from typing import Any

from mpcompare.fields import WayFields
from mpcompare.records import finite
from mpcompare.report.columns import OF_RUN, TEXT, Column, named, number, percentiles, recorded
from mpcompare.report.comparison import Comparison, Entry, Row


@dataclass(frozen=True)
class InferenceRow(Row):
    """A run and one way of inference with its network."""

    way: str
    result: WayFields
    repeated: bool  # whether the costs are an earlier run's costs: a race measures them once

    @property
    def recorded(self) -> dict[str, Any]:
        """The result as it stands in ``result.json``."""
        return finite(self.result)

    @property
    def time_ratio(self) -> float | None:
        """Latency of this way over the latency in fp32; None where either is missing."""
        fp32, own = ways(self.entry).get("fp32"), self.result.latency_ms
        return own / fp32.latency_ms if fp32 and fp32.latency_ms and own else None

    def shows(self, column: "Column[InferenceRow]") -> bool:
        """Whether a table for readers shows the column: repeated costs stand in the rows of the earlier run alone."""
        return not self.repeated or column.name in (*NAMES, *SCORES)


def ways(entry: Entry) -> dict[str, WayFields]:
    """Returns the results by way; empty where none was tried."""
    return entry.run.result.inference.ways if entry.ok and entry.run.result.inference else {}


def batch_size(entry: Entry) -> int | None:
    """Returns the number of samples in a batch of inference; None where no way was tried."""
    return entry.run.result.inference.batch_size if entry.run.result.inference else None


def rows_of(comparison: Comparison) -> list[InferenceRow]:
    rows: list[InferenceRow] = []
    earlier: list[list[float | None]] = []  # costs of the runs before
    for entry in comparison.entries:
        found = ways(entry)
        costs = [result.latency_ms for result in found.values()]
        rows += [InferenceRow(comparison, entry, way, result, costs in earlier) for way, result in found.items()]
        earlier.append(costs)
    return rows


def lines(comparison: Comparison) -> list[str]:
    """Returns a line that says why the costs of some runs are not shown, if they are not."""
    if not any(row.repeated for row in rows_of(comparison)):
        return []
    return ["inference: time and memory do not depend on who trained, and a race measures them once"]


def _way(row: InferenceRow, way: str) -> str:
    return f"{way} (unavailable: {reason})" if (reason := row.result.unavailable) is not None else way


NAMES, SCORES = ("label", "way"), ("test_accuracy", "test_loss")  # columns that name a row; that depend on training
COLUMNS: tuple[Column[InferenceRow], ...] = (
    *OF_RUN,
    Column("way", TEXT, "The precision, and how the network got there.", lambda row: row.way, heading="in", text=_way),
    Column("batch_size", "1", "The number of samples in a batch.", lambda row: batch_size(row.entry)),
    recorded("test_accuracy", "1", "The accuracy on held-out samples.", heading="test acc.", text=number(".4f")),
    recorded("test_loss", "1", "The loss on held-out samples.", heading="test loss", text=number(".5f")),
    recorded("latency_ms", "ms", "The time of a batch, median of the timed ones.",
             heading="ms/batch p50", text=number()),
    recorded("latency_ms_p20", "ms", "The time of a batch, 20th percentile of the timed ones."),
    recorded("latency_ms_p80", "ms", "The time of a batch, 80th percentile of the timed ones."),
    percentiles("latency_ms", "The time of a batch, 20th to 80th percentile of the timed ones."),
    recorded("samples_per_s", "1/s", "The samples of a batch over its median time.",
             heading="samples/s", text=number()),
    recorded("peak_memory_bytes", "bytes", "The measured peak of memory, weights and batch included.",
             heading="peak MB", text=number(per=1e6)),
    recorded("weight_bytes", "bytes", "The memory of parameters and buffers.",
             heading="weights MB", text=number(per=1e6)),
    recorded("unavailable", TEXT, "The reason why the network cannot be applied in this way."),
    Column("time_vs_fp32", "1", "The time of a batch in this way over the time in fp32: smaller is faster.",
           lambda row: row.time_ratio, heading="time / fp32", text=number(".2f")),
)  # fmt: skip
# The columns of a console, in their order there.
SHOWN = named(
    COLUMNS,
    "label way test_accuracy test_loss latency_ms latency_ms_p20_p80 time_vs_fp32 samples_per_s peak_memory_bytes "
    "weight_bytes",
)
