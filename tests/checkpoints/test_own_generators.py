"""A backend that rounds at random with a generator of its own, which is a part of its state."""

import copy

import pytest
import torch
from support.tasks import make_batch, make_task

from mpcompare.backends.peers.bf16_weights import Bf16Weights
from mpcompare.checkpoints.checkpoint import Checkpoint, put_together, take_apart
from mpcompare.contract import take_step
from mpcompare.loss_scale import NoLossScale
from mpcompare.verdict.examine.numerics import same_bits
from mpcompare.verdict.examine.resume import lost_entries

TASK = make_task()


class RoundsByItself(Bf16Weights):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.generator = torch.Generator().manual_seed(1)

    def step(self, lr):
        with torch.no_grad():
            for p in self.model.parameters():
                bits = (p.float() - lr * p.grad.float()).view(torch.int32)
                noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=self.generator)
                p.copy_(((bits + noise) & -65536).view(torch.float32))

    def state_dict(self):
        return {**super().state_dict(), "generators": {"rounding": self.generator.get_state()}}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if "generators" in state:
            self.generator.set_state(state["generators"]["rounding"])


class Forgets(RoundsByItself):
    def load_state_dict(self, state):
        super().load_state_dict({name: part for name, part in state.items() if name != "generators"})


def trained(cls, steps):
    backend = cls(TASK.new_model(0, torch.device("cpu")), TASK, "bf16", NoLossScale())
    for number in range(steps):
        advance(backend, number)
    return backend


def advance(backend, number):
    x, y = make_batch(TASK, torch.device("cpu"), seed=number)
    take_step(backend, [(x, y)], 0.1)


@pytest.mark.parametrize(("cls", "lost"), [(RoundsByItself, []), (Forgets, ["generators"])])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(cls, lost):
    backend = trained(cls, steps=3)
    saved = Checkpoint(copy.deepcopy(backend.state_dict()), 3, 3, 3, {})
    resumed = trained(cls, steps=0)
    resumed.load_state_dict(put_together(*take_apart(saved)).state)
    assert lost_entries(backend.state_dict(), resumed.state_dict()) == lost
    for number in (3, 4):
        advance(backend, number)
        advance(resumed, number)
    ends = backend.master_params(), resumed.master_params()
    assert all(same_bits(p, ends[1][name]) for name, p in ends[0].items()) == (not lost)


def test_a_state_of_a_backend_without_generators_has_none():
    saved = Checkpoint(trained(Bf16Weights, steps=1).state_dict(), 1, 1, 1, {})
    assert "generators" not in put_together(*take_apart(saved)).state
