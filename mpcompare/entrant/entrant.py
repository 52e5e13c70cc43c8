"""One entrant, from its first line to its last: a pass for each question, and turns, so that several can be compared.

what does it compute?     training.py, with every step recorded; then verdict/examine
where is what precision?  contract.Backend.module_dtypes of a backend that does nothing else
how long is a step?       timing.py: blocks of bare steps, in turns with the others
where does the time go?   timing.py: blocks with a clock between the phases
how much must be live?    memory.py: a few steps of a fresh backend under the memory meter
what is it worth?         inference.py: what was trained, forward only, in each precision
"""

import copy
import time
from collections.abc import Sequence
from typing import Any

from mpcompare.checkpoints import Checkpoint
from mpcompare.cost.flops import step_flops
from mpcompare.entrant import resume
from mpcompare.entrant.evaluation import Evaluations
from mpcompare.entrant.inference import measure_inference
from mpcompare.entrant.memory import measure_memory
from mpcompare.entrant.monitor import Monitor
from mpcompare.entrant.plan import Plan
from mpcompare.entrant.setup import Setup, set_up
from mpcompare.entrant.timing import Trained, fresh, take_turns, time_phases, try_block
from mpcompare.entrant.training import train
from mpcompare.instruments import heap, meter
from mpcompare.instruments.clock import percentiles, settle
from mpcompare.precision import PRECISIONS
from mpcompare.race.turns import Progress, Turn, Turns
from mpcompare.records import Recorder
from mpcompare.shared import ALONE, Shared
from mpcompare.tasks.task import params_of
from mpcompare.tasks.twin import examined_twin
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.examine import Subject, examine


def compete(plan: Plan, recorder: Recorder, shared: Shared = ALONE) -> Turns:
    """Everything that one run does, turn by turn (``race``); writes what it finds with ``recorder``.

    Args:
        shared: what the entrants of a race compute once: the data set, the float64 oracle.
    """
    yield Turn()  # what is slow to import is imported
    found = resume.find(plan)
    setup = set_up(plan, recorder, shared)
    identity = resume.identity(plan, setup, recorder.result)
    start = None if found is None else resume.fit(found, identity, setup.loss_scale, plan.resume)
    if start is not None:
        recorder.add(resumed_from=resume.describe(start, plan.resume))

    rss_before = meter.rss_bytes() if meter.reset_peak_rss() else None
    stepper = setup.new_stepper() if start is None else resume.continue_from(setup, start)
    backend, stream = stepper.backend, setup.batches(0 if start is None else start.position)
    begun = 0 if start is None else start.step
    evaluations = Evaluations(setup, recorder, plan.eval_every)
    rows = yield from train(
        *(stepper, stream, plan.steps, plan.warmup_steps, setup.task.clip_norm, setup.clock, recorder, evaluations),
        monitor=Monitor(setup.task, PRECISIONS[setup.precision].storage, setup.clock, plan.monitor_every),
        begun=begun,
        saver=resume.saver_of(plan, identity, setup.device),
    )
    peak_rss = meter.peak_rss_bytes()  # before the last evaluation, which has activations of its own
    evaluated = evaluations.take(begun + len(rows), backend)
    recorder.add(
        first_step_ms=rows[0]["step_ms"],
        skipped_steps=sum(row["skipped"] for row in rows),
        final_loss=rows[-1]["loss"],
        final_loss_scale=float(backend.loss_scale()),
        engine=backend.engine,
        dtypes=backend.dtypes(),
        rss_before_bytes=rss_before,
        peak_rss_bytes=peak_rss,
        **evaluated,
    )

    trained = Trained(copy.deepcopy(backend.state_dict()), int(stepper.rates.updates))
    first = params_of(setup.model) if start is None else start.state["params"]
    moved = numerics.sketch({name: p - first[name].to(p.device) for name, p in backend.master_params().items()})
    trial = try_block(stepper, setup.batches(), plan.block_s, setup.clock)
    with heap.kept():
        if plan.examine:
            began, noise = time.monotonic(), plan.noise if plan.is_baseline else 0
            numbers = yield from examine(_subject(setup, start, shared), stepper, rows, noise)
            recorder.numerics({"moved": moved, **numbers})
            recorder.add(examine_s=time.monotonic() - began)
        del backend, stepper
        yield Progress(0, 1, "dtypes of each layer")
        recorder.add(module_dtypes=setup.new_backend().module_dtypes(*next(setup.batches())[0]))
    settle()
    with meter.frozen():
        finish, blocks, difference = yield from take_turns(setup, trained, trial, recorder, _trained(setup, rows))
    yield Progress(0, 1, "phases and memory")
    timed = percentiles(blocks)
    seconds = timed["step_ms_p50"] / 1e3
    x, y = next(setup.batches())[0]
    flops = step_flops(setup.model, plan.task.loss_fn, x, y)
    flops = None if flops is None else plan.task.accumulate * flops
    recorder.add(
        **timed,
        samples_per_s=plan.task.batch_size / seconds,
        flops_per_step=flops,
        tflops=None if flops is None else flops / seconds / 1e12,
        timing=vars(finish),
        timed_loss=trial.losses[-1],
        timed_loss_difference=difference,
        **time_phases(fresh(setup, trained), setup.batches(), trial.steps, setup.clock, setup.task),
    )
    recorder.add(**measure_memory(setup))
    if plan.inference:
        yield Progress(0, 1, "inference")
        budget_s, size = plan.inference_s, plan.inference_batch
        recorder.add(inference=measure_inference(setup, trained.state, evaluated, budget_s, size, shared))
    recorder.add(status="ok")
    yield Progress(1, 1, "done")


def _subject(setup: Setup, start: Checkpoint | None, shared: Shared) -> Subject:
    twin, replaced = examined_twin(setup.model, setup.task)
    return Subject(
        make_backend=setup.make_backend,
        model=setup.model,
        policy=setup.loss_scale,
        precision=setup.precision,
        task=setup.task,
        batches=setup.batches,
        twin=twin,
        replaced=replaced,
        start=start,
        shared=shared,
    )


def _trained(setup: Setup, rows: Sequence[dict[str, Any]]) -> str:
    first, last = rows[0], rows[-1]
    return (
        f"{setup.engine}, {setup.dataset.name}, {len(rows)} steps, loss {last['loss']:.4f}, "
        f"first step {first['step_ms']:.4g} ms, last {last['step_ms']:.4g} ms"
    )
