"""A small plan, and the turns of an entrant that has it."""

from functools import partial

from support.tasks import make_task

from mpcompare.backends.fp32 import Fp32
from mpcompare.entrant.plan import Plan
from mpcompare.loss_scale import auto
from mpcompare.race.turns import Progress
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.fingerprint import fingerprint

STARTS = []


class Watched(Fp32):
    """``fp32`` that records the weights and the batch of its first step."""

    def forward(self, x, y):
        if not hasattr(self, "begun"):
            self.begun = True
            STARTS.append((fingerprint(self.master_params()), x.sum().item()))
        return super().forward(x, y)


def turn(turns, order):
    event = turns.send(order)
    while isinstance(event, Progress):
        event = next(turns)
    return event


PLAN = Plan(
    backend="fp32", make_backend=Watched, options={}, task=make_task(in_features=784, out_features=10),
    load_data=partial(digits, samples=96), loss_scale=auto, precision="auto", device="cpu", seed=0, steps=4,
    warmup_steps=1, deterministic=False, block_s=0.002, examine=False, noise=0, is_baseline=False,
)  # fmt: skip
IDENTITY = {"backend": "fp32", "config": {}}
