"""Trains a task in fp16 autocast and prints the overflow threshold of each step, for python -m mpcompare.scalers.

    python scripts/record_thresholds.py char_gpt --steps 200 > thresholds.txt

The threshold of a step is the largest power of two by which its loss can be multiplied so that all gradients are
finite. Each step finds the threshold by computing the gradients at several scales, and updates with the gradients at
the threshold. So no step is skipped, and the loss scale is always as large as can be. In a training of its own, a
scaler that skips a step goes on from other weights.
"""

import argparse
from itertools import islice

import torch
from torch import Tensor, nn

from mpcompare.backends.torch_model import clip_gradients, set_lr
from mpcompare.command.nodes import composed, instantiate, task_of
from mpcompare.errors import fail
from mpcompare.loss_scale import any_non_finite
from mpcompare.tasks.data import batches

START, LARGEST = 2.0**16, 2.0**64  # the scale at which the search begins, and at which it ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="of conf/task")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration, as task.batch_size=32")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    cfg = composed([f"task={args.task}", *args.overrides])
    task = task_of(cfg.task).over(args.steps)
    model, rates = task.new_model(0, torch.device("cpu")), task.new_rates()
    optimizer = task.optimizer.make(model.parameters())
    print(f"# {' '.join([args.task, *args.overrides])}: fp16 autocast on a CPU, torch {torch.__version__}")
    threshold = START
    for x, y in islice(batches(instantiate(cfg.data)(0), task.batch_size), args.steps):
        with torch.autocast("cpu", torch.float16):
            loss = task.loss_fn(model(x), y)
        threshold = find(model, loss, threshold)
        for p in model.parameters():
            if p.grad is not None:  # frozen weights have none
                p.grad.div_(threshold)
        clip_gradients(task, model.parameters())
        set_lr(optimizer, rates.now)
        optimizer.step()
        rates.count(False)
        print(f"{threshold:.17g}", flush=True)


def find(model: nn.Module, loss: Tensor, scale: float) -> float:
    """Returns the threshold, searched from ``scale`` on, and leaves the gradients at that scale in the parameters."""
    while backward(model, loss, scale) and scale < LARGEST:
        scale *= 2
    while not backward(model, loss, scale):
        scale /= 2
        if scale == 0:
            fail(f"no loss scale makes the gradients finite, the loss is {loss.item():g}")
    return scale


def backward(model: nn.Module, loss: Tensor, scale: float) -> bool:
    """Computes the gradients of ``loss * scale``, and returns whether they are finite."""
    model.zero_grad()
    (loss * scale).backward(retain_graph=True)
    return not any_non_finite(p.grad for p in model.parameters() if p.grad is not None)


if __name__ == "__main__":
    main()
