"""A run that is trained and examined in this process, as its record would be read back."""

import json
import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from mpcompare.contract import Batches, Stepper
from mpcompare.dtypes import torch_dtype
from mpcompare.entrant.evaluation import held_out_of
from mpcompare.fields import Result, TrainingRecord
from mpcompare.loss_scale import LossScale, auto
from mpcompare.precision import PRECISIONS
from mpcompare.records import BLOCKS, finite, numbers
from mpcompare.report.runs import Run, no_rows
from mpcompare.tasks.data import batches
from mpcompare.tasks.draws import seed_step
from mpcompare.tasks.task import params_of
from mpcompare.testing.candidate import Candidate
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.exact_values import of_batch, of_network
from mpcompare.verdict.examine.examine import examine
from mpcompare.verdict.examine.midway import Midway
from mpcompare.verdict.examine.moves import Digest
from mpcompare.verdict.examine.subject import Subject
from mpcompare.verdict.findings import from_document, to_document

T = TypeVar("T")


def examined_run(
    name: str, candidate: Candidate, steps: int = 20, noise: int = 0, seed: int = 0, scaling: LossScale | None = None
) -> Run:
    """Trains and examines in this process; nothing is timed.

    Args:
        name: the name of the run and of its backend.
        candidate: the backend, its task and precision.
        noise: the number of runs that find the noise: two for a run that others are compared with.
        seed: the seed of the initial weights.
        scaling: the loss scale; None: the scale of ``loss_scale=auto``.

    Returns:
        The run, as its record would be read back.
    """
    model, task = replace(candidate, task=candidate.task.over(steps)).fitted(seed)
    candidate, scaling = replace(candidate, task=task), scaling or auto(candidate.precision)

    def stream() -> Iterator[Batches]:
        return (task.micro_batches(x, y) for x, y in batches(candidate.dataset, task.batch_size))

    lent = {**of_network(model), **of_batch(next(stream()))}
    stepper = Midway(Stepper(backend := candidate.make(model, scaling), task.new_rates()), task.schedule, 0, steps)
    rows: list[dict[str, Any]] = []
    digest = Digest(backend, torch_dtype(PRECISIONS[candidate.precision].storage))
    for number, batch in enumerate(islice(stream(), steps), start=1):
        scale = float(backend.loss_scale())
        seed_step(number, seed)
        loss = float(stepper.step(batch))
        rows.append({"step": number, "loss": loss, "loss_scale": scale, "skipped": bool(backend.skipped)})
        digest.take()
    initial = params_of(model)
    moved = numerics.sketch_of_change(initial, backend.master_params())
    precision = PRECISIONS[candidate.precision]
    held_out = held_out_of(model, candidate.dataset, task, steps)
    subject = Subject(candidate.make, model, scaling, precision, task, stream, lent=lent, held_out=held_out, seed=seed)
    findings = _result_of(examine(subject, stepper, rows, moved, noise, digest.moves()))
    findings = from_document(numbers(json.loads(json.dumps(finite(to_document(findings))))))
    layers = candidate.make(model, scaling).module_dtypes(*next(stream())[0])
    training = TrainingRecord(
        first_step_ms=math.nan, skipped_steps=sum(row["skipped"] for row in rows), final_loss=rows[-1]["loss"],
        final_loss_scale=float(backend.loss_scale()), engine=backend.engine, dtypes=backend.dtypes(),
        rss_before_bytes=None, peak_rss_bytes=None, test_loss=None, test_accuracy=None,
    )  # fmt: skip
    result = Result(
        status="ok", backend=name, precision=candidate.precision, task="task", batch_size=task.batch_size, seed=seed,
        config={"task": {}}, training=training, module_dtypes=layers,
    )  # fmt: skip
    return Run(Path(name), name, result, pd.DataFrame(rows), no_rows(BLOCKS), findings)


def _result_of(generator: Generator[Any, Any, T]) -> T:
    """Runs a generator to its end, and returns its value."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value
