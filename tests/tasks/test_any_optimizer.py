"""Any optimizer that works element by element: its replay in float64, and how far fp32 may be from it."""

import math
import re

import pytest
import torch

from mpcompare.errors import BackendUnavailable, InputError
from mpcompare.tasks.any_optimizer import AnyOptimizer
from mpcompare.tasks.optimizers import Coarse

# Names of torch.optim, with settings that take another way through its code.
KNOWN = [
    ("RAdam", {}),
    ("RAdam", {"decoupled_weight_decay": True}),
    ("NAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"maximize": True}),
]
IDS = ["-".join([name, *settings]) for name, settings in KNOWN]


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675: the sign of a mean, which any rounding may turn where the mean is next to 0."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(m.lerp(p.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - beta2)


class CountsInPython(torch.optim.Optimizer):
    """Adam whose count is a number of Python's, as in many packages: its corrections have more digits than fp32."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                state["step"] = t = state.get("step", 0) + 1
                m.lerp_(p.grad, 1 - beta1)
                v.lerp_(p.grad.square(), 1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m / (1 - beta1**t), (v / (1 - beta2**t)).sqrt_().add_(1e-8), value=-group["lr"])


class CountsInItsGroup(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] /= group["count"]
        super().step()


class OnlyCounts(torch.optim.Optimizer):
    """A rate that falls like the root of the count. The optimizer remembers nothing but the count."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("step", torch.zeros(()))
                count += 1
                p.add_(p.grad, alpha=-group["lr"] / count.item() ** 0.5)


class Noisy(torch.optim.SGD):
    def step(self):
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p))


OWN = [(f"{__name__}.{name}", {}) for name in ("Lion", "CountsInPython", "OnlyCounts")]


def of(name, settings=(), lr=1e-2, **more):
    decay = None if name == "Rprop" else 0.1
    return AnyOptimizer(name if "." in name else f"torch.optim.{name}", lr, decay, dict(settings), **more)


def updates_of(optimizer, number=12, elements=2000):
    """Yields the updates of fp32: weight, gradient, new weight, and everything that is remembered after it."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(elements, generator=generator))
    made = optimizer.make([p])
    for _ in range(number):
        p.grad = torch.randn(elements, generator=generator)
        p.grad *= 10 ** torch.empty(elements).uniform_(-12, 1, generator=generator)  # squares of some are next to 0
        p.grad[:5] = 0
        before = p.detach().clone()
        made.step()
        known = {kind: v for kind, v in made.state[p].items() if v is not None}
        state = {kind: v.clone() if torch.is_tensor(v) else torch.tensor(v) for kind, v in known.items()}
        yield before, p.grad.clone(), p.detach().clone(), state


def beyond(change, magnitude, before, after):
    """Returns the largest error of an update over its bound."""
    bound = ((before.double() + change).abs() + magnitude) * 2.0**-24 + 2.0**-149
    return ((after.double() - before.double() - change).abs() / bound).max().item()


@pytest.mark.parametrize(("name", "settings"), [*KNOWN, *OWN], ids=[*IDS, "Lion", "number", "count"])
def test_fp32_is_within_the_bounds_and_other_rates_are_not(name, settings):
    optimizer = of(name, settings)
    replay, other = optimizer.replay(), of(name, settings, lr=1.01e-2).replay()
    worst = remembered = 0.0
    elsewhere = []
    for before, grad, after, state in updates_of(optimizer):
        change, magnitude = replay.step("w", grad.double(), before.double(), 1e-2)
        worst = max(worst, beyond(change, magnitude, before, after))
        for kind, (value, may_be_off) in replay.kept("w").items():
            off = (state[kind].double() - value).abs() / (may_be_off * 2.0**-24)
            remembered = max(remembered, off.max().item())
        elsewhere.append(beyond(*other.step("w", grad.double(), before.double(), 1.01e-2), before, after))
    assert worst <= 0.7
    assert remembered <= 0.5
    if name != "Rprop":  # its rate is only the rate of the first update
        assert max(elsewhere) > 20


@pytest.mark.parametrize(("name", "settings"), [*KNOWN, *OWN], ids=[*IDS, "Lion", "number", "count"])
def test_a_replay_goes_on_from_a_state_that_was_loaded(name, settings):
    optimizer = of(name, settings)
    *_, (_, _, _, loaded), (before, grad, after, _) = updates_of(optimizer, 4)  # corrections are far from 1
    tensors = {kind: t.double().flatten() for kind, t in loaded.items() if kind != "step"}
    replay = optimizer.replay()
    replay.remember("w", tensors, int(loaded.get("step", 3)))
    change, magnitude = replay.step("w", grad.double(), before.double(), 1e-2)
    assert beyond(change, magnitude, before, after) <= 0.7


def test_moments_that_are_kept_with_fewer_digits_have_wider_bounds():
    optimizer = of("RAdam")
    fine, coarse = optimizer.replay(), optimizer.replay(Coarse(moments=2.0**16))
    for before, grad, _, _ in updates_of(optimizer, 3):
        for replay in (fine, coarse):
            replay.step("w", grad.double(), before.double(), 1e-2)
    for kind, (_, bound) in fine.kept("w").items():
        assert (coarse.kept("w")[kind][1] > 100 * bound).float().mean() > 0.9


def test_groups_have_rates_and_decays_of_their_own():
    groups = [{"match": "b", "lr_factor": 10, "weight_decay": 0}]
    optimizer = AnyOptimizer("torch.optim.RAdam", 1e-2, groups=groups)
    w, b = (torch.nn.Parameter(torch.ones(3)) for _ in "wb")
    made = optimizer.make([("w", w), ("b", b)])
    nodes = [{key: node[key] for key in ("lr", "weight_decay")} for node in made.param_groups]
    assert nodes == [{"lr": 0.01, "weight_decay": 0}, {"lr": 0.1, "weight_decay": 0}]
    one = torch.ones(3, dtype=torch.float64)
    changes = [optimizer.replay().step(name, one, one, 1e-2)[0] for name in "wb"]
    assert torch.allclose(changes[1], 10 * changes[0])


REFUSED = {
    "torch.optim.Adafactor": "its update of an element depends on other elements, or on random numbers",
    f"{__name__}.CountsInItsGroup": "it remembers something that is not in its state of a parameter, such as a count",
    f"{__name__}.Noisy": "its update of an element depends on other elements, or on random numbers",
    "torch.optim.LBFGS": r"cannot update a parameter by its gradient alone (TypeError: LBFGS.step() missing",
    "torch.optim.Muon": "cannot update a parameter by its gradient alone (ValueError: Muon only supports 2D",
    "torch.optim.SparseAdam": "cannot update a parameter by its gradient alone (RuntimeError: SparseAdam does not",
    "torch.optim.Nothing": "cannot be imported",
}


@pytest.mark.parametrize(("name", "said"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_replayed_is_said(name, said):
    with pytest.raises(InputError, match="^" + re.escape(f"task.optimizer._target_={name}: {said}")):
        AnyOptimizer(name, 1e-2)


def test_a_kernel_of_its_own_is_asked_for_only_where_there_is_one():
    with pytest.raises(BackendUnavailable, match=r"torch.optim.RAdam has no fused kernel"):
        of("RAdam").make([torch.nn.Parameter(torch.ones(1))], fused=True)


def test_what_is_remembered_is_known_before_the_first_update():
    like = torch.full((2, 3), 7.0)
    assert set(of("RMSprop", {"momentum": 0.9}).initial_state(like)) == {"step", "square_avg", "momentum_buffer"}
    first = of("Adagrad", {"initial_accumulator_value": 0.5}).initial_state(like)
    assert torch.equal(first["sum"], torch.full((2, 3), 0.5))
    assert math.isclose(first["step"].item(), 0)
    assert not of("SGD").remembers
    assert of(f"{__name__}.OnlyCounts").remembers
    assert of("Rprop").remembers
