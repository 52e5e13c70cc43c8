"""Updates of a right optimizer compared with the updates of known mistakes."""

from dataclasses import replace

import torch
from support.tasks import make_task

from mpcompare.tasks.optimizers import Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Warmup
from mpcompare.verdict.examine.known_mistakes import known_mistakes
from mpcompare.verdict.examine.numerics import spreads
from mpcompare.verdict.examine.seen import ELEMENTS, Seen


def test_a_right_optimizer_makes_no_known_mistake_and_each_mistake_has_a_cause():
    for optimizer in (Sgd(0.1, 0.9, nesterov=True, weight_decay=0.1), Adam(0.1, weight_decay=0.1), AdamW(0.1)):
        task = replace(make_task(), optimizer=optimizer, schedule=Warmup(5), clip_norm=1.0, accumulate=2)
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(30, 3 * ELEMENTS))
        torchs, updates = optimizer.make([p]), []
        for number in range(3):
            lr, g = optimizer.lr * task.schedule.factor(number), torch.randn(p.shape)
            p.grad, before = g.clone(), p.detach().clone()
            torchs.param_groups[0]["lr"] = lr
            torchs.step()
            before, after, grads, clipped = (spreads({"w": t}, ELEMENTS) for t in (before, p.detach(), 2 * g, g))
            updates.append(Seen(before, after, clipped, lr, grads=grads, clipped_norm=1.0, number=number, steps=number))
        assert updates[0].before["w"].shape[0] <= ELEMENTS
        assert known_mistakes(task, updates, torch.bfloat16) == {}
        wrong = [replace(update, after={"w": 2 * update.after["w"] - update.before["w"]}) for update in updates]
        found = known_mistakes(task, wrong, torch.bfloat16)
        assert {mistake.cause for mistake in found.values()} >= {"schedule", "clip", "gradient scaled", "weight decay"}
        assert min(mistake.excess for mistake in found.values()) > 1  # updating twice is no known mistake
