"""Which runs may stand in one report, and which of them in one comparison."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from mpcompare.errors import InputError, check_choice
from mpcompare.records import named_fields
from mpcompare.report.runs import Run

OBSERVED = ("dataset_fingerprint", "initial_weights")
FACET = ("device_name", "host", "threads")


def check_allowed(allow: object, tasks: Iterable[Mapping[str, Any]]) -> None:
    """Raises InputError unless ``allow`` is a list of fields of a task identity, or of what they are in, as in ``task``
    or ``task.model``.

    Args:
        tasks: the configurations of the tasks.
    """
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise InputError("report.allow", allow, "expected a list of names, such as [seed,task.optimizer.lr], or []")
    fields = dict.fromkeys(field for task in tasks for field in named_fields("task", task))
    words = [field.split(".") for field in fields]
    known = dict.fromkeys(".".join(each[:end]) for each in words for end in range(1, len(each) + 1))
    for name in allow:
        check_choice("report.allow", name, (*dict.fromkeys(("task", *known)), "seed", *OBSERVED))


def short_names(fields: Iterable[str]) -> dict[str, str]:
    """For each field its last word; where two end in the same word, all but ``task.``."""
    fields = dict.fromkeys(fields)
    last = [field.rpartition(".")[2] for field in fields]
    return {
        field: word if last.count(word) == 1 else field.removeprefix("task.")
        for field, word in zip(fields, last, strict=True)
    }


def check_comparable(runs: Sequence[Run], allow: Sequence[str]) -> None:
    """Raises InputError, which names every field that differs, unless ``runs`` belong into one report.

    They do if runs that were asked for the same task, data and seed have got the same data and initial weights, and if
    the sweeps hang together: each shares a task identity with another, so that all of them are connected.
    """
    pairs = [(differing(a, b, allow), a, b) for a, b in combinations(runs, 2)]
    for fields, a, b in pairs:
        # data=mnist,digits in one sweep are two comparisons; data=auto that finds one here, the other there is a fault.
        if fields and set(fields) <= set(OBSERVED) and a.result["config"].get("data") == b.result["config"].get("data"):
            raise _refusal(fields, a, b, allow)
    connected = {sweep(runs[0])}
    while border := [pair for pair in pairs if (sweep(pair[1]) in connected) != (sweep(pair[2]) in connected)]:
        fields, a, b = min(border, key=lambda pair: len(pair[0]))
        if fields:
            raise _refusal(fields, a, b, allow)
        connected |= {sweep(a), sweep(b)}


def _refusal(fields: Sequence[str], a: Run, b: Run, allow: Sequence[str]) -> InputError:
    (mine, theirs), every = (task_identity(a), task_identity(b)), [*allow, *fields]
    values = "; ".join(f"{f}={mine.get(f)} in {a.name}, {f}={theirs.get(f)} in {b.name}" for f in fields)
    first, _, rest = values.partition("=")
    return InputError(
        first,
        rest,
        f"these are not one comparison; report.allow=[{','.join(every)}], or --allow {' '.join(every)} of "
        "python -m mpcompare.report, puts them together",
    )


def sweep(run: Run) -> str:
    """What is the same for all runs of one sweep; a single run is a sweep of its own."""
    return run.result.get("sweep") or str(run.folder)


def task_identity(run: Run) -> dict[str, Any]:
    """Every field of the task, such as ``task.optimizer.lr``, the seed, and, unless the run failed before it knew them,
    ``OBSERVED``."""
    config = run.result["config"]
    asked_for = named_fields("task", config["task"]) if config["task"] else {}
    observed = {key: run.result[key] for key in OBSERVED if key in run.result}
    return {**asked_for, "seed": config.get("seed", run.result["seed"]), **observed}


def facet(run: Run) -> dict[str, Any]:
    """Where it ran: None for what an old record does not tell, nothing for what a run that failed early knew not."""
    return {key: run.result.get(key) for key in FACET if key in run.result or "device_name" in run.result}


def differing(a: Run, b: Run, allow: Sequence[str] = ()) -> list[str]:
    """Fields of the task identity in which the two differ, but for those that ``allow`` names or holds."""
    mine, theirs = task_identity(a), task_identity(b)
    unknown = {key for key in OBSERVED if key not in mine or key not in theirs}
    return [
        field
        for field in dict.fromkeys((*mine, *theirs))
        if mine.get(field) != theirs.get(field)
        and field not in unknown
        and not any(field == name or field.startswith(f"{name}.") for name in allow)
    ]


def group(runs: Sequence[Run], allow: Sequence[str]) -> list[list[Run]]:
    """Sorts ``runs`` into comparisons: one task identity, but for the fields in ``allow``, and one facet each."""
    groups: list[list[Run]] = []
    # Those that know where they ran first: they know all of it. The others join by what they know, their own sweep's
    # runs before those of another.
    for run in sorted(runs, key=lambda run: "device_name" not in run.result):
        fitting = [g for g in groups if not differing(g[0], run, allow) and _same_facet(g[0], run)]
        own = [g for g in fitting if sweep(run) in map(sweep, g)]
        if chosen := own or fitting:
            chosen[0].append(run)
        else:
            groups.append([run])
    place = {id(run): number for number, run in enumerate(runs)}
    groups = [sorted(g, key=lambda run: place[id(run)]) for g in groups]
    return sorted(groups, key=lambda g: place[id(g[0])])


def _same_facet(a: Run, b: Run) -> bool:
    mine, theirs = facet(a), facet(b)
    return all(mine[key] == theirs[key] for key in mine if key in theirs)


def varied(runs: Sequence[Run]) -> list[str]:
    """Fields of the task identity in which any two of ``runs`` differ: what was asked for, then what was observed."""
    fields = dict.fromkeys(field for a, b in combinations(runs, 2) for field in differing(a, b))
    return sorted(fields, key=lambda field: field in OBSERVED)
