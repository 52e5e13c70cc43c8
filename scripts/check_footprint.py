"""Compares the footprint with the measured peak: counts each recipe's steps, takes them for real, and prints both.

    python scripts/check_footprint.py mnist_cnn char_gpt [--batch N] [--length T] [--optimizer adamw]

The steps are computed on this CPU, so the networks must fit into its memory. One count is without the memory inside of
kernels, and one with it (--kernels of python -m mpcompare.footprint).
"""

import argparse
import warnings

import torch

from mpcompare.contract import take_step
from mpcompare.footprint.count import STEPS, Batch, FootprintSubject, count
from mpcompare.footprint.fake import MeasuredKernels
from mpcompare.footprint.recipes import RECIPES, FootprintRecipe
from mpcompare.footprint.subject import Wish, subject_of
from mpcompare.instruments import meter
from mpcompare.tasks.task import Task

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--optimizer")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*FakeTensor.*")
    print(f"{'':32}{'measured':>10}{'counted':>10}{'':>9}{'with kernels':>13}")
    for name in args.names:
        wish = Wish(name, batch=args.batch, length=args.length, optimizer=args.optimizer)
        for recipe in RECIPES:
            show(recipe, subject_of(wish), name)


def show(recipe: FootprintRecipe, subject: FootprintSubject, name: str) -> None:
    """Prints a line with the three peaks in MB, and the differences of the counts from the measured one."""
    real = measured(recipe, subject.task, subject.batch)
    line = f"{name:16}{recipe.name:16}{real / 1e6:10.4g}"
    for kernels in (None, MeasuredKernels()):
        counted = count(recipe, subject.model, subject.task, subject.batch, kernels).bytes
        line += f"{counted / 1e6:10.4g}{counted / real - 1:+9.2%}"
    print(line, flush=True)


def measured(recipe: FootprintRecipe, task: Task, batch: Batch) -> int:
    """Returns the peak of real steps of a new backend, and the batch; the network that it copied is left out."""
    model = task.new_model(0, CPU)
    x, y = batch.tensors(model, task)
    backend = recipe.make(model, task)
    optimizer = getattr(backend, "optimizer", None)
    kept = [*backend.model.parameters(), *backend.model.buffers()]
    kept += [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
    batches = task.micro_batches(x, y)

    def run() -> None:
        for _ in range(STEPS):
            take_step(backend, batches, task.optimizer.lr)

    return meter.peak_memory(CPU, run).bytes + sum(storages.values()) + x.nbytes + y.nbytes


if __name__ == "__main__":
    main()
