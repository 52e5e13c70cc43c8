"""The runs that may stand in one report, and those that stand in one comparison."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from mpcompare.errors import InputError, check_choice
from mpcompare.records import MACHINE, named_fields
from mpcompare.report.runs import Run

OBSERVED = ("dataset_fingerprint", "initial_weights")


def check_allowed(allow: object, tasks: Iterable[Mapping[str, Any]]) -> None:
    """Raises InputError unless ``allow`` is a list of fields of a task identity, or of groups of them, as ``task`` or
    ``task.model``.

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
    """Returns for each field its last word; where two end in the same word, all but ``task.``."""
    fields = dict.fromkeys(fields)
    last = [field.rpartition(".")[2] for field in fields]
    return {
        field: word if last.count(word) == 1 else field.removeprefix("task.")
        for field, word in zip(fields, last, strict=True)
    }


def check_comparable(runs: Sequence[Run], allow: Sequence[str]) -> None:
    """Raises InputError, which names every field that differs, unless ``runs`` belong into one report.

    They do if runs that were asked for the same task, data and seed have got the same data and initial weights, and if
    the sweeps hang together: each shares a task identity with another, so that all of them are connected. A run whose
    task is not known stands in the way of none.
    """
    runs = [run for run in runs if task_identity(run)]
    pairs = [(differing(a, b, allow), a, b) for a, b in combinations(runs, 2)]
    for fields, a, b in pairs:
        # data=mnist,digits in one sweep are two comparisons; data=auto that finds one here, the other there is a fault.
        if fields and set(fields) <= set(OBSERVED) and a.result["config"].get("data") == b.result["config"].get("data"):
            raise _refusal(fields, a, b, allow)
    connected = {sweep(run) for run in runs[:1]}
    while border := [pair for pair in pairs if (sweep(pair[1]) in connected) != (sweep(pair[2]) in connected)]:
        fields, a, b = min(border, key=lambda pair: len(pair[0]))
        if fields:
            raise _refusal(fields, a, b, allow)
        connected |= {sweep(a), sweep(b)}


def _refusal(fields: Sequence[str], a: Run, b: Run, allow: Sequence[str]) -> InputError:
    of_a, of_b, every = task_identity(a), task_identity(b), [*allow, *fields]
    values = "; ".join(f"{f}={of_a.get(f)} in {a.name}, {f}={of_b.get(f)} in {b.name}" for f in fields)
    first, _, rest = values.partition("=")
    return InputError(
        first,
        rest,
        f"these are not one comparison; report.allow=[{','.join(every)}], or --allow {' '.join(every)} of "
        "python -m mpcompare.report, puts them together",
    )


def sweep(run: Run) -> str:
    """Returns a name that all runs of one sweep share; a single run is a sweep of its own."""
    return run.result.get("sweep") or str(run.folder)


def task_identity(run: Run) -> dict[str, Any]:
    """Returns every field of the task, such as ``task.optimizer.lr``, the seed, and ``OBSERVED``, unless the run failed
    before it knew them. Empty where the task itself is not known: of a record that cannot be read."""
    config = run.result["config"]
    if not config["task"]:
        return {}
    asked_for = named_fields("task", config["task"])
    observed = {key: run.result[key] for key in OBSERVED if key in run.result}
    return {**asked_for, "seed": config.get("seed", run.result["seed"]), **observed}


def facet(run: Run) -> dict[str, Any]:
    """Returns the place where the run was: device, host and threads. Empty where the run failed before it knew it."""
    return {key: run.result[key] for key in MACHINE if key in run.result}


def differing(a: Run, b: Run, allow: Sequence[str] = ()) -> list[str]:
    """Returns the fields of the task identity in which the two differ, but for those that ``allow`` names or holds."""
    of_a, of_b = task_identity(a), task_identity(b)
    if not of_a or not of_b:
        return []
    unknown = {key for key in OBSERVED if key not in of_a or key not in of_b}
    return [
        field
        for field in dict.fromkeys((*of_a, *of_b))
        if of_a.get(field) != of_b.get(field)
        and field not in unknown
        and not any(field == name or field.startswith(f"{name}.") for name in allow)
    ]


def group(runs: Sequence[Run], allow: Sequence[str]) -> list[list[Run]]:
    """Sorts ``runs`` into comparisons: one task identity, but for the fields in ``allow``, and one facet each."""
    groups: list[list[Run]] = []
    # Runs that know where they ran come first: they know all of it. The others join by the fields that they know, the
    # runs of their own sweep before those of another, and one whose sweep is not known those of the folder it is in.
    for run in sorted(runs, key=lambda run: (not task_identity(run), "device_name" not in run.result)):
        fitting = [g for g in groups if not differing(g[0], run, allow) and _same_facet(g[0], run)]
        own = [g for g in fitting if sweep(run) in map(sweep, g)]
        own = own or [g for g in fitting if run.folder.parent in [other.folder.parent for other in g]]
        if chosen := own or fitting:
            chosen[0].append(run)
        else:
            groups.append([run])
    place = {id(run): number for number, run in enumerate(runs)}
    groups = [sorted(g, key=lambda run: place[id(run)]) for g in groups]
    return sorted(groups, key=lambda g: place[id(g[0])])


def _same_facet(a: Run, b: Run) -> bool:
    of_a, of_b = facet(a), facet(b)
    return all(of_a[key] == of_b[key] for key in of_a if key in of_b)


def varied(runs: Sequence[Run]) -> list[str]:
    """Returns the fields of the task identity in which any two runs differ: those asked for, then those observed."""
    fields = dict.fromkeys(field for a, b in combinations(runs, 2) for field in differing(a, b))
    return sorted(fields, key=lambda field: field in OBSERVED)
