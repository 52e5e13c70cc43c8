"""The table of runs: a row a run. ``summary.csv`` and the console show it; ``summary.md`` and ``.tex`` do in brief."""

import math
from collections.abc import Sequence
from dataclasses import replace

from mpcompare.numerals import as_ratio
from mpcompare.report.columns import TEXT, YES_NO, Column, named, number, one_line, percent, percentiles, recorded
from mpcompare.report.comparison import Comparison, Row
from mpcompare.report.remarks import environment, resumed_from

NAMES = ("backend", "precision", "variant")  # the columns of a run that did not finish
LONG = 16  # characters: a baseline's label from here on is "baseline" in the headings


def columns_of(row: Row) -> list[Column[Row]]:
    """Returns the columns of a run: all in ``COLUMNS``, and in their midst one for each of its own phases."""
    return [*_BEFORE_PHASES, *map(_phase, row.recorded.get("phase_ms", {})), *_AFTER_PHASES]


def shown(comparison: Comparison) -> list[Column[Row]]:
    """Returns the columns of ``SHOWN`` that say something of these runs, with the baseline in their headings."""
    baselines = list(dict.fromkeys(comparison.label(e.baseline) for e in comparison.entries if e.baseline))
    versus = baselines[0] if len(baselines) == 1 and len(baselines[0]) < LONG else "baseline"
    needless = {"baseline": len(baselines) < 2, "variant": not any(entry.variant for entry in comparison.entries)}
    columns = [column for column in SHOWN if not needless.get(column.name)]
    return [replace(column, heading=column.heading.format(baseline=versus)) for column in columns]


def brief(rows: Sequence[Row]) -> list[Column[Row]]:
    """Returns the columns of ``BRIEF``, without the variant and the accuracy where no run has one. Their headings name
    the baseline where all runs have the same one."""
    labels = {row.comparison.label(row.entry.baseline) for row in rows if row.entry.baseline}
    versus = labels.pop() if len(labels) == 1 else "baseline"
    optional = ("variant", "test_accuracy")
    return [
        replace(column, heading=one_line(column.heading.format(baseline=versus)))
        for column in BRIEF
        if column.name not in optional or any(column.value(row) is not None for row in rows)
    ]


def cell(column: Column[Row], row: Row) -> str:
    """Returns the text of a cell. A run that did not finish has its names, and its status in place of a verdict."""
    if row.entry.ok:
        return column.cell(row)
    if column.name == "verdict":
        return row.entry.run.result.status
    return column.cell(row) if column.name in NAMES else ""


def brief_cells(columns: Sequence[Column[Row]], row: Row) -> list[str]:
    """Returns the cells of a run in a document, each in one line."""
    return [one_line(cell(column, row)) for column in columns]


def _phase(name: str) -> Column[Row]:
    return Column(
        f"phase_{name.replace(' ', '_')}_ms",
        "ms",
        f"The median time of the phase {name!r} in a step; empty where it holds no work.",
        lambda row: row.recorded["phase_ms"].get(name),
    )


def _loss_difference(row: Row) -> float | str | None:
    """Returns the largest difference; a word where it is no number, which is a result and not an empty cell."""
    if not len(apart := row.entry.loss_diff):
        return None
    difference = float(apart.max(skipna=False))
    return difference if math.isfinite(difference) else str(difference)


def _time_ratio(row: Row, _: float) -> str:
    """A ratio without an interval is no number that anyone could rely on."""
    if row.entry.is_baseline:
        return "1"
    ratio = row.entry.time_ratio
    return "-" if math.isnan(ratio.low) else str(ratio) + ("" if row.entry.side_by_side else "~")


_BEFORE_PHASES: tuple[Column[Row], ...] = (
    recorded("backend", TEXT, "The implementation.", heading="backend"),
    recorded("engine", TEXT, "The library that computes the matrix products.", heading="engine"),
    recorded("precision", TEXT, "The precision that was asked for.", heading="precision"),
    recorded("dataset", TEXT, "The data set."),
    recorded("step_ms_p20", "ms", "The time of a step, 20th percentile of the blocks."),
    recorded("step_ms_p50", "ms", "The time of a step, median of the blocks.",
             heading="ms/step p50", text=number()),
    recorded("step_ms_p80", "ms", "The time of a step, 80th percentile of the blocks."),
    percentiles("step_ms", "The time of a step, 20th to 80th percentile of the blocks."),
    Column("time_vs_baseline", "1",
           "The step time of the run over the step time of the baseline, median of the rounds: smaller is faster.",
           lambda row: row.entry.time_ratio.median, heading="time / {baseline}", text=_time_ratio),
    recorded("peak_memory_bytes", "bytes", "The measured peak of a step's memory, the batch included.",
             heading="peak MB", text=number(per=1e6)),
    Column("peak_memory_vs_baseline", "1",
           "The measured peak of the run over the measured peak of the baseline: smaller is less memory.",
           lambda row: row.entry.memory_ratio, heading="memory / {baseline}",
           text=lambda row, value: "1" if row.entry.is_baseline else as_ratio(value)),
    Column("peak_memory_vs_model", "1", "The measured peak over the peak of the analytic model, less 1.",
           lambda row: row.entry.model_difference, heading="vs model",
           text=lambda _, difference: percent(difference), in_files=False),
    recorded("final_loss", "1", "The training loss of the last step.", heading="final loss", text=number(".5f")),
    Column("max_abs_loss_diff_vs_baseline", "1",
           "The largest difference of the training loss to the baseline's training loss.",
           _loss_difference, heading="max |loss - {baseline}|", wraps=True,
           text=lambda row, difference: "baseline" if row.entry.is_baseline else number(".1e")(row, difference)),
    recorded("test_accuracy", "1",
             "The accuracy on held-out samples after training; empty for tasks without classes.",
             heading="test acc.", text=number(".4f")),
    Column("baseline", TEXT, "The run that this one is compared with.",
           lambda row: row.entry.baseline.name if row.entry.baseline else None,
           heading="baseline", text=lambda row, _: row.comparison.label(row.entry.baseline)),
    Column("time_vs_baseline_low", "1", "The lower end of the 95 % interval of time_vs_baseline.",
           lambda row: row.entry.time_ratio.low),
    Column("time_vs_baseline_high", "1", "The upper end of the 95 % interval of time_vs_baseline.",
           lambda row: row.entry.time_ratio.high),
    Column("side_by_side", YES_NO, "Whether the run and its baseline took turns, so that drift does not matter.",
           lambda row: row.entry.side_by_side if row.entry.ok else None),
    Column("rounds", "1", "The number of rounds of timed blocks.",
           lambda row: row.recorded.get("timing", {}).get("rounds")),
    Column("stopped", TEXT, "The reason why timing stopped: narrow intervals (rel_ci), or the end of its budget.",
           lambda row: row.recorded.get("timing", {}).get("stopped")),
)  # fmt: skip
_AFTER_PHASES: tuple[Column[Row], ...] = (
    recorded("phase_overhead", "1", "The cost of the clock between the phases, relative to bare steps."),
    recorded("construct_s", "s", "The time that making the backend took, builds and compilation included."),
    recorded("first_step_ms", "ms", "The time of the first step."),
    recorded("peak_memory_bytes_analytic", "bytes", "The peak of a step's memory by the analytic model."),
    recorded("loss_scale", TEXT, "The kind of loss scaling."),
    recorded("skipped_steps", "1", "The number of training steps that were skipped for an overflow."),
    recorded("task", TEXT, "The task."),
    recorded("batch_size", "1", "The number of samples in a batch."),
    recorded("seed", "1", "The seed of the initial weights and of generated data."),
    recorded("device_name", TEXT, "The device."),
    recorded("host", TEXT, "A hash of the machine's name."),
    recorded("threads", "1", "The number of threads that torch used."),
    recorded("status", TEXT, "The state of the run: ok, failed, interrupted or running."),
    Column("error", TEXT, "The reason why the run did not finish.", lambda row: row.entry.error or None),
    Column("run", TEXT, "The folder of the run.", lambda row: row.entry.run.name),
    Column("variant", TEXT, "The options that tell the run from others of its backend and precision.",
           lambda row: row.entry.variant or None, heading="variant"),
    recorded("workspace_bytes", "bytes", "The memory that the matrix products hold for themselves."),
    recorded("peak_rss_bytes", "bytes", "The largest resident set of the process while it trained."),
    Column("environment", TEXT, "The environment variables that were set and make a program faster or slower.",
           lambda row: environment(row.entry.run) or None),
    Column("resumed_from", TEXT, "The checkpoint at which training began.",
           lambda row: resumed_from(row.entry.run) or None),
    Column("not_the_same", TEXT, "The fields in which the runs of the comparison differ because that was allowed.",
           lambda row: row.comparison.not_the_same or None),
    Column("verdict", TEXT, "The verdict: whether the run computes the same as its reference.",
           lambda row: row.entry.verdict.word if row.entry.verdict else None,
           heading="verdict", wraps=True,
           text=lambda row, word: f"{row.entry.word.sign} {row.entry.verdict}" if word else ""),
    Column("cause", TEXT, "The cause where the verdict is that the run differs, or cannot be compared.",
           lambda row: (row.entry.verdict.cause or None) if row.entry.verdict else None),
)  # fmt: skip
COLUMNS = (*_BEFORE_PHASES, *_AFTER_PHASES)
# The columns of a console, the most important first: a narrow one shows the others in further tables.
SHOWN = named(
    COLUMNS,
    "backend precision variant verdict step_ms_p50 time_vs_baseline peak_memory_bytes peak_memory_vs_baseline "
    "test_accuracy final_loss max_abs_loss_diff_vs_baseline engine step_ms_p20_p80 peak_memory_vs_model baseline",
)
# The columns of a document, in their order there.
BRIEF = named(
    COLUMNS,
    "backend precision variant verdict step_ms_p50 time_vs_baseline peak_memory_bytes peak_memory_vs_baseline "
    "final_loss test_accuracy",
)
