"""The runs that may stand in one report, and the runs that stand in one comparison."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from mpcompare.errors import InputError, check_choice
from mpcompare.records import MACHINE, named_fields
from mpcompare.report.runs import OBSERVED, STEPS_ASKED, Run


def check_is_list(allow: object) -> Sequence[Any]:
    """Returns ``allow``. Raises InputError unless it is a list."""
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise InputError("report.allow", allow, "expected a list of names, such as [seed,task.optimizer.lr], or []")
    return allow


def check_allowed(allow: object, tasks: Iterable[Mapping[str, Any]]) -> None:
    """Raises InputError unless ``allow`` is a list of fields of a task identity, or of groups of them, as ``task`` or
    ``task.model``. ``tasks`` are the configurations of the tasks."""
    fields = dict.fromkeys(field for task in tasks for field in named_fields("task", task))
    words = [field.split(".") for field in fields]
    known = dict.fromkeys(".".join(each[:end]) for each in words for end in range(1, len(each) + 1))
    for name in check_is_list(allow):
        check_choice("report.allow", name, (*dict.fromkeys(("task", *known)), "seed", *OBSERVED, *STEPS_ASKED))


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
    the sweeps hang together: each shares a task identity with another, so that all sweeps are connected. A run whose
    task is not known fits every report.
    """
    tasks: dict[object, dict[object, Run]] = {}  # by task, one run of each sweep and each data set
    for run in runs:
        if run.task_identity:
            data = run.result.config.get("data"), [run.task_identity.get(key) for key in OBSERVED]
            tasks.setdefault(_asked_for(run, allow), {}).setdefault((sweep(run), repr(data)), run)
    pairs = [pair for alike in tasks.values() for pair in combinations(alike.values(), 2)]
    for a, b in pairs:
        # data=mnist,digits in one sweep are two comparisons; data=auto that finds one here, the other there is a fault.
        if a.result.config.get("data") == b.result.config.get("data") and (fields := differing(a, b, allow)):
            raise _refusal(fields, a, b, allow)
    known = [run for alike in tasks.values() for run in alike.values()]
    connected = {sweep(run) for run in known[:1]}
    while others := [run for run in known if sweep(run) not in connected]:
        border = [(a, b) for a, b in pairs if (sweep(a) in connected) != (sweep(b) in connected)]
        joined = {sweep(run) for pair in border if not differing(*pair, allow) for run in pair}
        if not joined:
            ours = [run for run in known if sweep(run) in connected]
            every = ((differing(a, b, allow), a, b) for a in ours for b in others)
            raise _refusal(*min(every, key=lambda each: len(each[0])), allow)
        connected |= joined


def _refusal(fields: Sequence[str], a: Run, b: Run, allow: Sequence[str]) -> InputError:
    of_a, of_b, every = a.task_identity, b.task_identity, [*allow, *fields]
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
    return run.result.sweep or str(run.folder)


def facet(run: Run) -> dict[str, Any]:
    """Returns the place where the run was: device, host and threads. Empty where the run failed before it knew it."""
    machine = run.result.machine
    return {key: getattr(machine, key) for key in MACHINE} if machine else {}


def differing(a: Run, b: Run, allow: Sequence[str] = ()) -> list[str]:
    """Returns the fields of the task identity in which the two differ, except fields that ``allow`` names or holds."""
    of_a, of_b = a.task_identity, b.task_identity
    if not of_a or not of_b:
        return []
    unknown = {key for key in OBSERVED if key not in of_a or key not in of_b}
    fields = [field for field in dict.fromkeys((*of_a, *of_b)) if of_a.get(field) != of_b.get(field)]
    return [field for field in fields if field not in unknown and not _is_in(field, allow)]


def _is_in(field: str, allow: Sequence[str]) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in allow)


def _asked_for(run: Run, allow: Sequence[str]) -> object:
    """Returns a key that runs share whose task identities differ in ``allow`` and ``OBSERVED`` at most."""
    fields = {field: value for field, value in run.task_identity.items() if value is not None}
    return frozenset((key, _key(value)) for key, value in fields.items() if not _is_in(key, (*allow, *OBSERVED)))


def _key(value: Any) -> object:
    return tuple(map(_key, value)) if isinstance(value, list) else repr(value) if isinstance(value, dict) else value


def group(runs: Sequence[Run], allow: Sequence[str]) -> list[list[Run]]:
    """Sorts ``runs`` into comparisons: one task identity, but for the fields in ``allow``, and one facet each."""
    groups: dict[object, list[list[Run]]] = {}  # by their tasks
    # Runs that know where they ran come first: they know all fields. The others join by the fields that they know:
    # first the runs of their own sweep, then of another. Without a sweep, a run joins the runs of its folder first.
    for run in sorted(runs, key=lambda run: (not run.task_identity, run.result.machine is None)):
        alike = groups.setdefault(_asked_for(run, allow), [])
        among = alike if run.task_identity else [g for each in groups.values() for g in each]
        here = facet(run)  # a run that does not know it fits every place
        fitting = [g for g in among if not differing(g[0], run, allow) and (not here or facet(g[0]) in ({}, here))]
        own = [g for g in fitting if sweep(run) in map(sweep, g)]
        own = own or [g for g in fitting if run.folder.parent in [other.folder.parent for other in g]]
        if chosen := own or fitting:
            chosen[0].append(run)
        else:
            alike.append([run])
    place = {id(run): number for number, run in enumerate(runs)}
    every = [sorted(g, key=lambda run: place[id(run)]) for alike in groups.values() for g in alike]
    return sorted(every, key=lambda g: place[id(g[0])])


def varied(runs: Sequence[Run]) -> list[str]:
    """Returns the fields of the task identity in which any two runs differ: first fields asked for, then observed."""
    known = [run.task_identity for run in runs if run.task_identity]
    fields = sorted(dict.fromkeys(field for each in known for field in each), key=lambda field: field in OBSERVED)
    values = {field: [each.get(field) for each in known if field in each or field not in OBSERVED] for field in fields}
    return [field for field in fields if any(value != values[field][0] for value in values[field])]
