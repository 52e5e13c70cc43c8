"""A step of a library's row takes the time of a bare loop of that library: what the row adds is within 2 %.

Row and loop take turns of about half a second at the same task, one and then the other ahead, and each pair of turns
gives a ratio. ``-m quiet -n 0 -s`` shows them.
"""

import importlib
import os
import time

import pytest
import torch
from support.judging import dataset_of
from support.tasks import make_task
from torch import nn

from mpcompare.backends.peers import accelerate, fabric, keras
from mpcompare.contract import take_step
from mpcompare.loss_scale import NoLossScale
from mpcompare.race.intervals import ratio

LR, MOMENTUM = 0.05, 0.9
TASK = make_task(
    in_features=784, hidden=[2048], out_features=10, batch_size=2048, samples=2048, lr=LR, momentum=MOMENTUM
)
PAIRS, SECONDS, LIMIT = 24, 0.5, 1.02
LIBRARIES = {
    "fabric": ("lightning_fabric", fabric.FabricRow),
    "accelerate": ("accelerate", accelerate.AccelerateRow),
    "keras": ("keras", keras.KerasRow),
}


def loop_of(made, model, optimizer, x, y):
    """Returns the step of a library that wraps network and optimizer, and takes the backward pass."""

    def step():
        optimizer.zero_grad()
        made.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return step


def loop_of_fabric(library, model, x, y):
    """Returns a step as https://lightning.ai/docs/fabric/stable writes it."""
    made = library.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    return loop_of(made, *made.setup(model, torch.optim.SGD(model.parameters(), LR, MOMENTUM)), x, y)


def loop_of_accelerate(library, model, x, y):
    """Returns a step as https://huggingface.co/docs/accelerate writes it."""
    importlib.import_module("accelerate.state").AcceleratorState._reset_state()
    made = library.Accelerator(mixed_precision="bf16", cpu=True)
    return loop_of(made, *made.prepare(model, torch.optim.SGD(model.parameters(), LR, MOMENTUM)), x, y)


def loop_of_keras(library, model, x, y):
    """Returns a step as https://keras.io/guides/writing_a_custom_training_loop_in_torch writes it."""
    dense, policy = library.layers.Dense, "mixed_bfloat16"
    made = library.Sequential([dense(2048, activation="relu", dtype=policy), dense(10, dtype=policy)])
    made.build((None, 784))
    optimizer = library.optimizers.SGD(LR, MOMENTUM)
    optimizer.build(made.trainable_weights)

    def step():
        loss = nn.functional.cross_entropy(made(x.flatten(1)).float(), y)
        made.zero_grad()
        loss.backward()
        gradients = [weight.value.grad for weight in made.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, made.trainable_weights)

    return step


LOOPS = {"fabric": loop_of_fabric, "accelerate": loop_of_accelerate, "keras": loop_of_keras}


def seconds(step, count):
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


@pytest.mark.quiet
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_row_takes_the_time_of_a_bare_loop(name):
    os.environ["KERAS_BACKEND"] = "torch"
    module, row = LIBRARIES[name]
    library = pytest.importorskip(module)
    model, data = TASK.new_model(0, torch.device("cpu")), dataset_of(TASK)
    x, y = data.x_train, data.y_train
    backend = row(model, TASK, "bf16", NoLossScale())
    steps = {"row": lambda: take_step(backend, [(x, y)], LR), "loop": LOOPS[name](library, model, x, y)}
    count = max(1, round(SECONDS / max(min(seconds(step, 2) for _ in range(2)) for step in steps.values())))
    times = {who: [] for who in steps}
    for pair in range(PAIRS):
        for who in list(steps)[:: 1 if pair % 2 else -1]:
            times[who].append(seconds(steps[who], count))
    found = ratio(times["row"], times["loop"])
    print(f"\n{name}: {1e3 * min(times['loop']):.3g} ms, the row {found.median:.4f} ", end="")
    print(f"({found.low:.4f} to {found.high:.4f}) times the bare loop, {PAIRS} pairs of {count} steps")
    assert found.median <= LIMIT
