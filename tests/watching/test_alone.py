"""The copy of an optimizer in which its own code makes an update once more."""

import torch
from torch import nn

from mpcompare.watching.alone import Original, left_out
from mpcompare.watching.rules import rules_of


class Told(torch.optim.Optimizer):
    """Steps whose size is a sum of powers, with an argument that no group has, and a cache of its own."""

    def __init__(self, params, power, model):
        super().__init__(params, {"lr": 0.5})
        self.power, self.model, self.sizes = power, model, {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, product=1.0)
                state["step"] += 1
                state["product"] *= 0.5
                size = self.sizes.setdefault(state["step"], 1 + state["product"])
                p.sub_(group["lr"] * size * p.grad.abs() ** self.power)


def told():
    return Told([nn.Parameter(torch.ones(4))], 2.0, nn.Linear(1, 1))


def test_its_constructor_and_what_it_has_besides_do_not_matter():
    optimizer = told()
    own, (weight, grad) = Original.of(optimizer), torch.ones(2, 4).double()
    state = {"step": 3, "product": 0.125}
    (rule,) = rules_of(optimizer, {"lr": 0.5}, state, own)
    replay = rule.replay("fp32", ())
    replay.remember("w", {"product": torch.tensor(0.125, dtype=torch.float64)}, 3)
    change, _ = replay.step("w", 3 * grad, weight, 0.25)
    assert change.tolist() == [-0.25 * (1 + 0.0625) * 9] * 4
    assert optimizer.sizes == {}
    assert not optimizer.state


def test_a_state_that_the_constructor_makes_is_there():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([p], initial_accumulator_value=0.5)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    (rule,) = rules_of(optimizer, group, optimizer.state[p])
    made = rule.make(other := nn.Parameter(torch.ones(2)))
    assert made.state[other]["sum"].tolist() == [0.5, 0.5]


def test_the_copy_calls_no_function_that_the_loop_gave():
    """It may hold something of the loop's, such as a counter."""
    optimizer, calls = told(), []
    optimizer.power = lambda: calls.append(1) or 2.0
    assert "power" not in Original.of(optimizer).attributes
    assert "power" in left_out(optimizer)
    assert all(rule.make is None for rule in rules_of(optimizer, {"lr": 0.5}, {}))
    assert calls == []


def test_a_state_that_is_no_mapping_is_none_of_ours():
    optimizer = torch.optim.SGD([p := nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.state[p] = torch.ones(3)
    assert Original.of(optimizer).state == {}


def test_an_optimizer_that_frees_something_at_its_end_is_not_copied():
    class Frees(Told):
        def __del__(self):
            pass

    rules = rules_of(Frees([nn.Parameter(torch.ones(3))], 2.0, None), {"lr": 0.5}, {})
    assert [rule.name for rule in rules] == ["SGD"]
