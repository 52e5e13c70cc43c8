"""The comparisons of a report: their titles, the labels of their runs, and the baseline of each run."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import pandas as pd

from mpcompare.phases import PHASES, WHOLE_STEP, Phase
from mpcompare.race.intervals import Interval, ratio, unpaired_ratio
from mpcompare.records import MACHINE, PLANNED
from mpcompare.report.comparable import OBSERVED, check_comparable, differing, facet, group, short_names, varied
from mpcompare.report.runs import UNREADABLE, Run
from mpcompare.verdict.judge.trajectories import loss_apart
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word


def phases_of(runs: Iterable[Run]) -> list[Phase]:
    """Returns the phases in which any of these finished runs works, in their order; the whole step comes last."""
    worked = {phase for run in runs for phase, ms in run.finished.phases.phase_ms.items() if ms is not None}
    return [phase for phase in (*PHASES, WHOLE_STEP) if phase in worked]


@dataclass(frozen=True)
class Entry:
    """A run in a comparison."""

    run: Run
    label: str  # the name of the run in the comparison: backend and precision, and whatever tells it from the others
    # the part of the label that is neither backend nor precision: the allowed fields and the version of torch in which
    # runs differ, and the options and the loss scale that most runs of the backend do not have
    variant: str
    # the run that this one is compared with; itself for a baseline; None if it failed or nothing finished
    baseline: Run | None
    verdict: Verdict | None = None  # the verdict on a run that finished; None before it is judged

    @property
    def ok(self) -> bool:
        return self.run.result.status == "ok"

    @property
    def is_baseline(self) -> bool:
        return self.baseline is self.run

    @property
    def word(self) -> Word:
        """The verdict on the run in a word or three."""
        if not self.ok:
            return Word.CANNOT_BE_READ if self.run.result.status == UNREADABLE else Word.DID_NOT_FINISH
        return self.verdict.said if self.verdict else Word.NOT_EXAMINED

    @property
    def error(self) -> str:
        """The reason why the run did not finish, in one line; empty if it did."""
        if self.ok:
            return ""
        if self.run.result.status == PLANNED:
            return "planned, and not run yet"
        return self.run.result.error or "ended without a word: killed, or still running"

    @property
    def side_by_side(self) -> bool:
        """Whether this run and its baseline took turns, so that their ratio is free of the machine's drift."""
        if self.baseline is None or self.is_baseline:
            return self.is_baseline
        own, other = self.run.race, self.baseline.race
        return own is not None and own == other

    @cached_property
    def time_ratio(self) -> Interval:
        """This run's step time over the baseline's, with its 95 % interval. It is the median of the ratios of all
        rounds if the two took turns, else the ratio of their medians; nan where there is none."""
        if not self.ok or self.baseline is None:
            return Interval(math.nan, math.nan, math.nan)
        if self.is_baseline:
            return Interval(1.0, 1.0, 1.0)
        own, baseline = (run.blocks.set_index("round")["step_ms"] for run in (self.run, self.baseline))
        if not self.side_by_side:
            return unpaired_ratio(own.to_list(), baseline.to_list())
        rounds = own.index.intersection(baseline.index)
        return ratio(own[rounds].to_list(), baseline[rounds].to_list())

    @property
    def memory_ratio(self) -> float:
        """This run's measured peak memory over the baseline's; nan where there is none."""
        if not self.ok or self.baseline is None:
            return math.nan
        own, other = (run.finished.memory.peak_memory_bytes for run in (self.run, self.baseline))
        return own / other if other else math.nan

    @property
    def model_difference(self) -> float:
        """Measured peak memory over the analytic model's, less 1; nan where there is no model."""
        memory = self.run.result.memory
        model = memory.peak_memory_bytes_analytic if memory else None
        return memory.peak_memory_bytes / model - 1 if self.ok and memory and model else float("nan")

    @cached_property
    def loss_diff(self) -> pd.Series:
        """``|loss - baseline's loss|`` by the steps that both have."""
        if not self.ok or self.baseline is None:
            return pd.Series(dtype=float)
        return loss_apart(self.run, self.baseline)


@dataclass
class Comparison:
    """Runs of one task on the same data from the same weights on one device."""

    title: str  # task, batch, seed and device, and whatever tells the comparison from others
    dataset: str  # the data set, and the reason why it was chosen
    # a line that names the fields in which the runs differ because that was allowed; empty if in none
    not_the_same: str = ""
    entries: list[Entry] = field(default_factory=list)

    @property
    def finished(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.ok]

    @property
    def rows(self) -> list["Row"]:
        """A row of a table for each run."""
        return [Row(self, entry) for entry in self.entries]

    def label(self, run: Run | None) -> str:
        """Returns the label of one of the runs; empty for None."""
        return next((entry.label for entry in self.entries if entry.run is run), "")

    def reference(self, entry: Entry) -> Entry | None:
        """Returns the run by which ``entry`` was judged, itself for a reference; None where it was not judged."""
        name = entry.verdict.reference if entry.verdict else None
        return next((each for each in self.finished if each.run.name == name), None)

    def of_reference(self, entry: Entry) -> str:
        """Returns whether other runs were judged by ``entry``, in words."""
        others = any(self.reference(each) is entry for each in self.finished if each is not entry)
        return "others are compared with it" if others else "no other run is compared with it"

    def judged(self, verdicts: Mapping[str, Verdict]) -> "Comparison":
        """Returns the comparison with these verdicts on its runs, by their names."""
        return replace(self, entries=[replace(entry, verdict=verdicts.get(entry.run.name)) for entry in self.entries])


@dataclass(frozen=True)
class Row:
    """A row of a table: a run, and its comparison."""

    comparison: Comparison
    entry: Entry

    @property
    def recorded(self) -> Mapping[str, Any]:
        """The fields of the record that the row shows."""
        return self.entry.run.recorded


def compare(runs: Sequence[Run], baseline: str, allow: Sequence[str] = ()) -> list[Comparison]:
    """Sorts ``runs`` into comparisons and finds each run's baseline. Raises InputError where the runs differ in fields
    that are not in ``allow``.

    Args:
        baseline: the backend of the baselines; a baseline in the same precision is preferred. Where this backend is
            missing, the first run that finished takes its place.
        allow: fields of the task identity in which runs of one comparison may differ.
    """
    check_comparable(runs, allow)
    groups = group(runs, allow)
    return [_comparison(g, title, baseline) for g, title in zip(groups, _titles(groups), strict=True)]


def _comparison(runs: Sequence[Run], title: str, baseline: str) -> Comparison:
    finished = [run for run in runs if run.result.status == "ok"]
    datasets = [f"data: {made.dataset} ({made.dataset_reason})" for run in runs if (made := run.result.set_up)]
    different = varied(runs)
    preferred = [run for run in finished if run.result.backend == baseline] or finished[:1]
    variants = _joined(_variants(runs), _options(runs))
    variants = _joined(variants, _sweeps(runs, variants))
    baselines = [closest(run, preferred, baseline) if run.result.status == "ok" else None for run in runs]
    return Comparison(
        title=title,
        dataset=_each(datasets) if "dataset_fingerprint" in different else (datasets or ["no data"])[0],
        not_the_same=f"NOT THE SAME: {', '.join(different)} (report.allow)" if different else "",
        entries=[*map(Entry, runs, _labels(runs, variants), variants, baselines)],
    )


def closest(run: Run, among: Iterable[Run], backend: str) -> Run:
    """Returns the run with which ``run`` is best compared, the first of several. What matters most comes first: the
    precision, the fields in which they differ, the version of torch, the start of training, the ``backend``, and of
    several runs of this backend the race."""

    def distance(other: Run) -> tuple[bool | int, ...]:
        return (
            other.result.precision != run.result.precision,
            len(differing(other, run)),
            _torch(other) != _torch(run),
            other.start != run.start,
            other.result.backend != backend,
            other.result.backend == backend and other.race != run.race,
        )

    return min(among, key=distance)


def _torch(run: Run) -> str | None:
    """Returns the version of torch; None where it is not known."""
    return run.recorded.get("versions", {}).get("torch")


def _titles(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Task, batch, seed and device; where several share these, also the fields that tell them apart; the threads and
    the host of each where not all ran on one machine."""
    known = [[{**run.task_identity, **facet(run), "task": run.result.task} for run in runs] for runs in groups]

    def each(key: str) -> list[str]:
        return [_each(run[key] for run in runs if run.get(key) is not None) for runs in known]

    shown = ("task", "task.batch_size", "seed", "device_name")
    fields = zip(*map(each, shown), strict=True)
    titles = [f"{task}, batch {batch}, seed {seed}, {device or 'no device'}" for task, batch, seed, device in fields]
    names = short_names(key for runs in known for run in runs for key in run if key.startswith(("task.", "train.")))
    words = {key: f"{name} {{}}" for key, name in names.items()}
    for key, word in {**words, "threads": "{} threads", "host": "host {:.8}"}.items():
        values = each(key)
        among = titles if key not in MACHINE else [""] * len(titles)  # a machine: among all titles, not alike ones
        different = Counter(title for title, _ in set(zip(among, values, strict=True)))  # values of each title
        titles = [
            f"{title}, {word.format(value)}" if value and different[others] > 1 else title
            for title, value, others in zip(titles, values, among, strict=True)
        ]
    return titles


def _each(values: Iterable[object]) -> str:
    return "/".join(dict.fromkeys(map(str, values)))


def _joined(*columns: Sequence[str]) -> list[str]:
    return [" ".join(filter(None, words)) for words in zip(*columns, strict=True)]


def _variants(runs: Sequence[Run]) -> list[str]:
    """For each run its values of the fields in which runs differ, except values that follow from others; its torch."""
    words: list[list[str]] = [[] for _ in runs]
    names = short_names(key for run in runs for key in run.task_identity)
    for key in varied(runs):
        pairs = combinations(zip(runs, words, strict=True), 2)
        if any(word_a == word_b and key in differing(a, b) for (a, word_a), (b, word_b) in pairs):
            for run, own in zip(runs, words, strict=True):
                if key in (identity := run.task_identity):
                    value = identity[key][:8] if key in OBSERVED else identity[key]
                    own.append(f"{names[key]}={value}")
    torch = [*map(_torch, runs)]
    if len({*torch} - {None}) > 1:
        for version, own in zip(torch, words, strict=True):
            own += [f"torch {version}"] if version else []
    return [" ".join(own) for own in words]


def _options(runs: Sequence[Run]) -> list[str]:
    """For each run the options of its backend, its loss scale and the options of that, in which the runs of this
    backend in this precision differ; a value that most of these runs have is left out. An option that a run lacks is
    ``-``, unless its loss scale is of another kind: such an option says nothing of it."""

    def options(run: Run) -> dict[str, Any]:
        nodes = (run.result.config.get(name) for name in ("backend", "loss_scale"))  # whatever was asked for
        items = (item for node in nodes if isinstance(node, Mapping) for item in node.items())
        known = {key: v for key, v in items if not key.startswith("_") and "${" not in str(v)}
        return {**known, **({"loss_scale": made.loss_scale} if (made := run.result.set_up) else {})}

    def words(own: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        kind = own.get("loss_scale")
        for key in dict.fromkeys(key for each in alike for key in each):
            peers = [each for each in alike if (key in own and key in each) or each.get("loss_scale") == kind]
            values, value = [str(each.get(key, "-")) for each in peers], str(own.get(key, "-"))
            if len(set(values)) > 1 and values.count(value) <= len(values) / 2:
                yield f"{key}={value}"

    every = [((run.result.backend, run.result.precision), options(run)) for run in runs]
    return [" ".join(words(own, [each for other, each in every if other == kind])) for kind, own in every]


def _sweeps(runs: Sequence[Run], variants: Sequence[str]) -> list[str]:
    """For each run the folder of its sweep, if runs of several sweeps would have one label without it."""
    labels = [(run.result.backend, run.result.precision, v) for run, v in zip(runs, variants, strict=True)]
    folders = [run.name.rpartition("/")[0] for run in runs]
    apart = len(set(labels)) < len(runs) == len(set(zip(labels, folders, strict=True)))
    return [f"in {folder}" if apart else "" for folder in folders]


def _labels(runs: Sequence[Run], variants: Sequence[str]) -> list[str]:
    """Backend, precision (once where both are one word) and variant; where runs share these, engine or folder, too."""

    def labels(*keys: str) -> list[str]:
        words = ([*(str(run.recorded.get(key, "")) for key in keys), v] for run, v in zip(runs, variants, strict=True))
        return [" ".join(filter(None, dict.fromkeys(each))) for each in words]

    found = labels("backend", "precision")
    if len(set(found)) < len(runs):
        found = labels("backend", "precision", "engine")
    named = zip(runs, found, strict=True)
    return [f"{label} [{run.name}]" if found.count(label) > 1 else label for run, label in named]
