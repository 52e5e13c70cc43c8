"""``check_backend``: all requirements, on each task in each precision."""

from collections.abc import Iterator, Mapping
from typing import Any

from mpcompare.contract import BackendUnavailable
from mpcompare.errors import in_full
from mpcompare.instruments import fp32_products, machine
from mpcompare.precision import PRECISIONS, resolve_precision
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.task import Task
from mpcompare.testing import requirements
from mpcompare.testing.candidate import BrokenContract, Candidate, Checked
from mpcompare.testing.small_tasks import small_tasks

Tasks = Mapping[str, tuple[Task, Dataset]]


def check_backend(
    backend_class: Any,
    *,
    precision: str | None = None,
    device: str = "cpu",
    tasks: Tasks | None = None,
    **options: Any,
) -> Checked:
    """Checks a backend's class against the contract.

    Args:
        backend_class: as ``mpcompare/contract.py`` describes it.
        precision: one of its ``PRECISIONS``, or ``auto``; None: all of them, without tf32 on a CPU.
        device: ``cpu``, ``cuda``, or ``auto``.
        tasks: by name, a task and its data of at least 10 batches; None: :func:`small_tasks`. Tasks that the backend
            says it cannot train (``BackendUnavailable``) are skipped.
        options: its own, for its constructor.

    Returns:
        The list of what was checked, and of what was skipped.

    Raises:
        BrokenContract: it breaks requirements (all are listed), or nothing could be checked.
        InputError: a precision that it does not have, or a device that is not there.
    """
    name = getattr(backend_class, "__name__", str(backend_class))
    if broken := list(requirements.of_the_class(backend_class, options)):
        raise BrokenContract(name, broken)
    where = machine.select_device(device)
    if precision is not None:
        precision = resolve_precision(precision, backend_class.PRECISIONS, where.type, name)
    checked = Checked()
    candidates_of: dict[str, list[str]] = {}
    for task_name, (task, dataset) in (small_tasks() if tasks is None else tasks).items():
        for each in backend_class.PRECISIONS if precision is None else (precision,):
            candidate = Candidate(backend_class, task, dataset.to(where), each, options, where, task_name)
            tf32 = PRECISIONS[each].uses_tf32
            if tf32 and where.type != "cuda":
                checked.skipped[candidate.name] = f"{each} needs a CUDA GPU"
                continue
            with fp32_products.tf32(tf32):
                for sentence in _check(candidate, checked):
                    candidates_of.setdefault(sentence, []).append(candidate.name)
    broken = [f"{sentence} ({', '.join(candidates)})" for sentence, candidates in candidates_of.items()]
    if not broken and not checked.candidates:
        reasons = "; ".join(dict.fromkeys(checked.skipped.values()))
        broken = [f"nothing could be checked: {reasons or 'there is no task'}"]
    if broken:
        raise BrokenContract(name, broken)
    return checked


def _check(candidate: Candidate, checked: Checked) -> Iterator[str]:
    try:
        backend = candidate.new()
    except BackendUnavailable as error:
        checked.skipped[candidate.name] = str(error)
        return
    except Exception as error:
        yield f"the constructor raises {in_full(error)}"
        return
    checked.candidates.append(candidate.name)
    if broken := list(requirements.of_the_interface(backend)):
        yield from broken
        return
    broken = [each for requirement in requirements.REQUIREMENTS for each in _all_of(requirement, candidate, checked)]
    yield from broken or _all_of(requirements.verdict, candidate, checked)


def _all_of(requirement: requirements.Requirement, candidate: Candidate, checked: Checked) -> Iterator[str]:
    """Yields a sentence for each breach of the requirement; a backend that raises breaks it."""
    try:
        yield from requirement(candidate, checked)
    except Exception as error:
        yield f"{(requirement.__doc__ or '').splitlines()[0].rstrip('.')}: raises {in_full(error)}"
