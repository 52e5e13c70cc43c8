"""The clean process of a job, which computes what all entrants are compared with. It is made before the backend's
module is imported."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial

from omegaconf import DictConfig

from mpcompare.clean_process import CleanProcess
from mpcompare.command.nodes import task_of
from mpcompare.contract import Batches
from mpcompare.instruments import fp32_products, heap, machine, memory_limit
from mpcompare.tasks.draws import with_shared_masks
from mpcompare.tasks.trial import fitted
from mpcompare.verdict.examine.exact_values import Problem, of_network

log = logging.getLogger(__name__)


def process_of_job(cfg: DictConfig) -> AbstractContextManager[CleanProcess | None]:
    """Starts the process of one job; yields None where the job is not examined, or no process can be started."""
    try:
        if cfg.verdict.get("enabled") is True:
            import torch._dynamo  # noqa: F401 - torch's optimizers import it in their first step: here once for both

            return closing(CleanProcess(partial(make_problem, cfg), _with_memory))
    except OSError as error:
        log.warning(f"the oracle is computed in the process of the backend ({error})")
    return nullcontext()


@contextmanager
def _with_memory() -> Iterator[None]:
    with memory_limit.limited(), heap.kept():
        yield


def make_problem(cfg: DictConfig, batch: Batches) -> tuple[Problem, str]:
    """Returns the problem of the job's exact values, and the fingerprint of its network."""
    if cfg.train.deterministic:  # it takes a second to import
        machine.set_deterministic(True)
    task = task_of(cfg.task)
    fp32_products.set_tf32(False)
    device = machine.select_device(cfg.device)
    with fp32_products.tf32(False):  # a user's module may set flags of its own when it is imported
        model = task.new_model(cfg.seed, device)
    on_device = [(x.to(device), y.to(device)) for x, y in batch]
    task = fitted(model, task, *on_device[0])
    return Problem(with_shared_masks(model), task.loss_fn, on_device), of_network(model)["network"]
