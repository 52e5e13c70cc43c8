"""The optimizers are torch's, and their replays are torch's in float64, within what fp32 rounds."""

import math
from dataclasses import asdict

import pytest
import torch

from mpcompare.errors import InputError
from mpcompare.tasks import optimizers
from mpcompare.tasks.optimizers import Adam, AdamW, Coarse, Sgd

OPTIMIZERS = [
    Sgd(),
    Sgd(0.1),
    Sgd(0.1, weight_decay=0.1),
    Sgd(0.1, 0.9),
    Sgd(0.1, 0.9, nesterov=True),
    Sgd(0.1, 0.9, True, 0.1),
    Adam(),
    Adam(0.01, (0.5, 0.9), 1e-6),
    Adam(0.1, (0.0, 0.99), weight_decay=0.1),
    Adam(0.1, (0.9, 0.95), 1e-15, 0.01),
    AdamW(),
    AdamW(0.1, (0.9, 0.95), 1e-6, 0.1),
    AdamW(0.01, (0.0, 0.0), weight_decay=0.0),
    AdamW(1e-5, weight_decay=0.5),
]
SCALES = [1.0, 0.1, 0.01, 1.0, 1e-3]  # factors of lr and of the gradients in the course of a run
U = 2.0**-24


def with_lr(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


def settings(optimizer):
    """Returns the optimizer's own settings by torch's names."""
    return {name: value for name, value in asdict(optimizer).items() if name != "groups"}


def gradients(weight, weight_decay, step):
    """Returns gradients of many magnitudes. Some are 0, and some cancel the decay."""
    grad = SCALES[step] * torch.randn_like(weight)
    grad[::5] *= 10 ** torch.empty_like(grad[::5]).uniform_(-30, 2)
    grad[1::5] = -weight_decay * weight[1::5] * (1 + 1e-5 * torch.randn_like(weight[1::5]))
    grad[2::50] = 0.0
    return grad


def test_defaults_are_torchs():
    for cls in optimizers.OPTIMIZERS:
        defaults = cls.of_torch([torch.zeros(1)]).defaults
        assert settings(cls()) == {name: defaults[name] for name in settings(cls())}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_it_makes_torchs_own(optimizer):
    for fused in (False, True):
        torchs = optimizer.make(iter([torch.nn.Parameter(torch.ones(3))]), fused)
        assert type(torchs) is optimizer.of_torch
        assert torchs.defaults.items() >= {**settings(optimizer), "fused": fused or None}.items()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_in_float64_the_replay_is_torchs_step(optimizer):
    torch.manual_seed(0)
    weights = {"w": torch.randn(40, 5).double(), "b": torch.zeros(5).double()}
    modules = {name: torch.nn.Parameter(w.clone()) for name, w in weights.items()}
    torchs, replay = optimizer.make(modules.values()), optimizer.replay()
    for step, scale in enumerate(SCALES):
        lr = scale * optimizer.lr
        with_lr(torchs, lr)
        for name, p in modules.items():
            p.grad = gradients(p.detach().flatten(), 0.0, step).reshape(p.shape)
            change, magnitude = replay.step(name, p.grad.clone(), weights[name], lr)
            weights[name] = weights[name] + change
            assert bool((magnitude >= change.abs()).all())
        torchs.step()
        for name, p in modules.items():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_from_a_state_that_was_loaded_the_replay_is_torchs_step(optimizer):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(200).double())
    torchs = optimizer.make([p])
    for _ in range(3):
        p.grad = torch.randn(200).double()
        torchs.step()
    updates = 2048
    state = torchs.state[p]
    if "step" in state:
        state["step"].fill_(updates)
    kept = {kind: t.clone() for kind, t in state.items() if t is not None and t.dim()}
    replay, before = optimizer.replay(), p.detach().clone()
    replay.remember("p", kept, updates)
    for step in range(2):
        p.grad = gradients(before, 0.0, step)
        change, magnitude = replay.step("p", p.grad.clone(), before, optimizer.lr)
        torchs.step()
        torch.testing.assert_close(before + change, p.detach(), rtol=1e-13, atol=1e-15)
        assert bool((magnitude >= change.abs()).all())
        before = p.detach().clone()


def excess(p, before, change, magnitude):
    """Returns the largest error of a new weight, in units of the error that the examination accepts of fp32."""
    error = (p.detach().double() - before - change).abs()
    return (error / (U * ((before + change).abs() + magnitude) + 2.0**-149)).max().item()


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_torchs_fp32_is_within_the_roundings_of_the_replay(optimizer, how):
    torch.manual_seed(0)
    for size in (1e-3, 1.0, 0.0):
        p = torch.nn.Parameter(size * torch.randn(20011))
        torchs, replay = optimizer.of_torch([p], **settings(optimizer), **how), optimizer.replay()
        for step, scale in enumerate(SCALES):
            before = p.detach().clone()
            p.grad = gradients(before, optimizer.weight_decay, step)
            moved = replay.step("w", p.grad.double(), before.double(), scale * optimizer.lr)
            with_lr(torchs, scale * optimizer.lr).step()
            assert excess(p, before.double(), *moved) <= 1


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_whose_bias_corrections_are_fp32_tensors_is_within_them_too(decoupled):
    """torch computes so with ``capturable=True``, which a CPU does not take."""
    torch.manual_seed(0)
    (beta1, beta2), lr, decay = (0.9, 0.999), 0.01, 0.1
    optimizer = (AdamW if decoupled else Adam)(lr, weight_decay=decay)
    w, replay, largest = 1e-3 * torch.randn(20011), optimizer.replay(), 0.0
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, 6):
        before, g = w, torch.randn(20011)
        moved = replay.step("w", g.double(), before.double(), lr)
        w, g = (w * (1 - lr * decay), g) if decoupled else (w, g + decay * w)
        m, v = m.lerp(g, 1 - beta1), v * beta2 + (1 - beta2) * g * g
        step = torch.tensor(float(t))
        c1, c2 = 1 - torch.tensor(beta1) ** step, 1 - torch.tensor(beta2) ** step
        w = w - m / c1 * lr / ((v / c2).sqrt() + 1e-8)
        largest = max(largest, excess(w, before.double(), *moved))
    assert 0.05 < largest <= 1


def test_adam_of_a_loaded_count_is_nearer_but_for_its_betas_in_fp32():
    """beta^t is one power there, whatever takes it, and a decay after the update is too far away."""
    torch.manual_seed(0)
    optimizer, updates = AdamW(1e-3), 2048
    (beta1, beta2), lr = optimizer.betas, optimizer.lr
    w, g, m = 0.02 * torch.randn(20011), torch.randn(20011), 0.3 * torch.randn(20011)
    v = 3e-3 * torch.rand(20011)
    short1, short2 = torch.tensor(beta1), torch.tensor(beta2)
    powers = {
        "pow": lambda beta: beta ** torch.tensor(updates + 1.0),
        "exp": lambda beta: torch.exp((updates + 1) * torch.log(beta)),
    }

    def after(power, late=False):
        new_m = m * short1 + (1 - short1) * g
        new_v = v * short2 + (1 - short2) * g * g
        c1, c2 = 1 - power(short1), 1 - power(short2)
        kept = w if late else w * (1 - lr * optimizer.weight_decay)
        new = kept - lr * (new_m / c1) / ((new_v / c2).sqrt() + optimizer.eps)
        return new * (1 - lr * optimizer.weight_decay) if late else new

    def worst(new, at_once):
        replay = optimizer.replay()
        replay.remember("w", {"exp_avg": m.double(), "exp_avg_sq": v.double()}, updates, at_once)
        return excess(new, w.double(), *replay.step("w", g.double(), w.double(), lr))

    for power in powers.values():
        assert 0.1 < worst(after(power), at_once=True) <= 1
        assert worst(after(power, late=True), at_once=False) <= 1
        assert worst(after(power, late=True), at_once=True) > 1.5


MISTAKES = {
    "no bias correction": lambda m, v, g, w, t: m / v.sqrt(),
    "bias correction of the step before": lambda m, v, g, w, t: (
        m / (1 - 0.9 ** (t + 1)) / (v / (1 - 0.999 ** (t + 1))).sqrt()
    ),
    "m in bf16": lambda m, v, g, w, t: m.bfloat16().float() / (1 - 0.9**t) / (v / (1 - 0.999**t)).sqrt(),
    "v in bf16": lambda m, v, g, w, t: m / (1 - 0.9**t) / (v.bfloat16().float() / (1 - 0.999**t)).sqrt(),
    "the change in fp16": lambda m, v, g, w, t: (m / (1 - 0.9**t) / (v / (1 - 0.999**t)).sqrt()).half().float(),
    "lr in fp16": lambda m, v, g, w, t: (
        1.0004 * (m / (1 - 0.9**t) / (v / (1 - 0.999**t)).sqrt())  # 1e-3 is 1.00040436e-3 there
    ),
    "no decay": lambda m, v, g, w, t: m / (1 - 0.9**t) / (v / (1 - 0.999**t)).sqrt() - 0.01 * w,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_beyond_the_roundings(mistake):
    torch.manual_seed(0)
    w, replay = 0.02 * torch.randn(20011), AdamW().replay()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in (1, 2):
        before, g = w, torch.randn(20011)
        moved = replay.step("w", g.double(), before.double(), 1e-3)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 1e-3 * (MISTAKES[mistake](m, v, g, w, t) + 0.01 * w)
        assert excess(w, before.double(), *moved) > 1


@pytest.mark.parametrize("optimizer", [Sgd(0.05, 0.9), Adam(1e-3), AdamW(1e-3)], ids=lambda each: type(each).__name__)
def test_bf16_arithmetic_is_within_the_roundings_of_a_coarse_replay_and_beyond_roundings_of_fp32(optimizer):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(2000).bfloat16())
    torch_optimizer = optimizer.make([p])
    over_fp32 = 2.0**-8 / 2.0**-24
    replays = {"coarse": optimizer.replay(Coarse(over_fp32, over_fp32)), "fp32": optimizer.replay()}
    largest = dict.fromkeys(replays, 0.0)
    for _ in range(4):
        p.grad, before = torch.randn(2000).bfloat16(), p.detach().double().clone()
        torch_optimizer.step()
        for name, replay in replays.items():
            change, magnitude = replay.step("p", p.grad.double(), before, optimizer.lr)
            coarse = over_fp32 if name == "coarse" else 1.0
            bound = 2.0**-24 * ((before + change).abs() * coarse + magnitude)
            error = ((p.detach().double() - before - change).abs() / bound).max().item()
            largest[name] = max(largest[name], error)
    assert largest["coarse"] <= 1 < largest["fp32"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_step_that_a_scaler_skips_is_no_update(optimizer):
    """Fused optimizers skip on the device, even the first step."""
    for fused in (False, True):
        p = torch.nn.Parameter(torch.ones(50))
        torchs, replay = optimizer.make([p], fused), optimizer.replay()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))  # the call makes its state
        for value in (math.inf, 1.0, math.nan, 2.0):
            before = p.detach().clone()
            p.grad = torch.full_like(p, value * scaler.get_scale())
            scaler.unscale_(torchs)
            scaler.step(torchs)
            scaler.update()
            if math.isfinite(value):
                assert (
                    excess(p, before.double(), *replay.step("w", p.grad.double(), before.double(), optimizer.lr)) <= 1
                )
            else:
                assert torch.equal(p, before)


def test_an_optimizer_knows_whether_it_remembers():
    remembering = [
        optimizer.remembers for optimizer in (Sgd(), Sgd(momentum=0.9), Adam(), AdamW(), Adam(betas=(0.0, 0.0)))
    ]
    assert remembering == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("betas", "bounded"),
    [((0.9, 0.999), True), ((0.9, 0.82), True), ((0.9, 0.5), False), ((0.9, 0.0), False), ((0, 0), True)],
)
def test_an_update_of_adam_is_bounded_where_the_squares_are_remembered_longer(betas, bounded):
    assert AdamW(betas=betas).bounded is bounded
    adam = Adam(lr=1.0, betas=betas, eps=1e-30).replay()
    weight, largest = torch.zeros(1, dtype=torch.float64), 0.0
    for gradient in [1.0] * 8 + [1e-12] * 40:
        change, _ = adam.step("w", torch.tensor([gradient], dtype=torch.float64), weight, 1.0)
        largest = max(largest, abs(float(change)))
    assert (largest < 10) is bounded


def test_betas_are_a_list_in_yaml():
    assert Adam(betas=[0, 0.99]) == Adam(betas=(0.0, 0.99))
    assert Adam(betas=[0, 0.99]).make([torch.nn.Parameter(torch.ones(1))]).defaults["betas"] == (0.0, 0.99)


@pytest.mark.parametrize("cls", [Sgd, Adam, AdamW])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0}, "task.optimizer.lr=0: expected a finite number above 0"),
        ({"lr": math.nan}, "task.optimizer.lr=nan"),
        ({"lr": "fast"}, "task.optimizer.lr=fast"),
        ({"weight_decay": -0.1}, "task.optimizer.weight_decay=-0.1: expected a finite number of at least 0"),
        ({"weight_decay": math.inf}, "task.optimizer.weight_decay=inf"),
        ({"weight_decay": None}, "task.optimizer.weight_decay=None"),
    ],
)
def test_bad_values_of_any_name_the_field(cls, values, message):
    with pytest.raises(InputError, match=message):
        cls(**values)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (Sgd, {"momentum": 1.0}, "task.optimizer.momentum=1.0: expected a finite number of at least 0 and below 1"),
        (Sgd, {"momentum": -0.5}, "task.optimizer.momentum=-0.5"),
        (Sgd, {"nesterov": True}, "task.optimizer.nesterov=True: needs a task.optimizer.momentum above 0"),
        (Sgd, {"momentum": 0.9, "nesterov": 1}, "task.optimizer.nesterov=1: expected true or false"),
        (Adam, {"eps": 0}, "task.optimizer.eps=0: expected a finite number above 0"),
        (AdamW, {"betas": 0.9}, "task.optimizer.betas=0.9: expected two numbers of at least 0 and below 1"),
        (AdamW, {"betas": [0.9]}, r"task.optimizer.betas=\[0.9\]"),
        (Adam, {"betas": [0.9, 1.0]}, r"task.optimizer.betas=\[0.9, 1.0\]"),
        (Adam, {"betas": [math.nan, 0.9]}, r"task.optimizer.betas=\[nan, 0.9\]"),
        (Adam, {"betas": ["a", 0.9]}, r"task.optimizer.betas="),
    ],
)
def test_bad_values_of_one_name_the_field(cls, values, message):
    with pytest.raises(InputError, match=message):
        cls(**values)
