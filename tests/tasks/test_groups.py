"""Parameter groups: their members, the groups in torch's optimizers and in a replay, and what is refused."""

import pytest
import torch
from support.backends import make_backend
from support.tasks import make_batch, make_task
from torch import nn

from mpcompare.contract import BackendUnavailable, take_step
from mpcompare.errors import InputError
from mpcompare.tasks.groups import by_names, check_groups, in_group
from mpcompare.tasks.optimizers import Adam, AdamW, Sgd

NO_DECAY = {"kind": "vectors", "weight_decay": 0}
OPTIMIZERS = [
    Sgd(0.1, 0.9, weight_decay=0.1, groups=[{"match": "1.*", "lr_factor": 3.0}, NO_DECAY]),
    Adam(0.01, weight_decay=0.1, groups=[NO_DECAY]),
    AdamW(0.01, weight_decay=0.1, groups=[{"kind": "biases", "weight_decay": 0.5, "lr_factor": 0.3}]),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))


def values(optimizer, model):
    """Returns learning rate, factor and decay of each parameter."""
    own = {name: in_group(optimizer, name, p.dim()) for name, p in model.named_parameters()}
    return {name: (o.lr, factor, o.weight_decay) for name, (o, factor) in own.items()}


def test_the_first_group_that_takes_a_parameter_has_it():
    first, second = {"match": ["0.*", "2.*"], "kind": "vectors", "weight_decay": 0}, {"kind": "biases", "lr_factor": 2}
    optimizer = Sgd(0.5, weight_decay=0.25, groups=[first, second])
    assert values(optimizer, network()) == {
        "0.weight": (0.5, 1.0, 0.25),
        "0.bias": (0.5, 1.0, 0),
        "1.weight": (0.5, 1.0, 0.25),
        "1.bias": (1.0, 2, 0.25),
        "2.weight": (0.5, 1.0, 0.25),
    }
    lstm = nn.LSTM(2, 2)
    assert {name for name, (_, factor, _) in values(Sgd(groups=[second]), lstm).items() if factor == 2} == {
        "bias_ih_l0", "bias_hh_l0",
    }  # fmt: skip
    assert in_group(Sgd(), "anything", 2) == (Sgd(), 1.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_torchs_groups_and_the_replay_have_the_same_values(optimizer):
    model = network().double()
    named = dict(model.named_parameters())
    torchs, replay = optimizer.make(named.items()), by_names(optimizer, named.items()).replay()
    alone = {name: in_group(optimizer, name, p.dim())[0].make([p.detach().clone()]) for name, p in named.items()}
    assert {name for group in torchs.param_groups for name, p in named.items() if any(p is q for q in group["params"])}
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in named.items()}
        for name, p in named.items():
            p.grad = torch.randn_like(p)
            (own,) = alone[name].param_groups[0]["params"]
            own.grad = p.grad.clone()
            alone[name].step()
        torchs.step()
        for name, p in named.items():
            flat = replay.step(name, p.grad.flatten(), before[name].flatten(), optimizer.lr)
            torch.testing.assert_close(p.detach().flatten(), before[name].flatten() + flat[0], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(p.detach(), alone[name].param_groups[0]["params"][0].detach())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("name", ["fp32", "amp", "master_weights", "scratch"])
def test_backends_update_each_group_by_its_values(name, optimizer):
    groups = [{"match": "layer1.*", "lr_factor": 3.0}, NO_DECAY]
    task = make_task()
    task = type(task)(task.model, task.loss, type(optimizer)(0.05, weight_decay=0.5, groups=groups), 32, 96)
    backend = make_backend(name, task, "fp32" if name == "fp32" else "bf16", torch.device("cpu"))
    by_hand = {n: nn.Parameter(p.clone()) for n, p in backend.master_params().items()}
    x, y = make_batch(task, torch.device("cpu"))
    torchs = type(optimizer)(0.05, weight_decay=0.5).make([nn.Parameter(torch.ones(1))])
    for n, p in by_hand.items():
        factor = 3 if n.startswith("layer1") else 1
        decay = 0.0 if p.dim() == 1 and not n.startswith("layer1") else 0.5
        torchs.add_param_group({"params": [p], "lr": 0.05 * 0.5 * factor, "weight_decay": decay})
    backend.forward(x, y)
    backend.backward()
    backend.unscale()
    for n, g in backend.grads().items():
        by_hand[n].grad = g.clone()
    backend.clip()
    backend.step(0.05 * 0.5)  # half of it: a schedule's
    torchs.step()
    for n, p in backend.master_params().items():
        torch.testing.assert_close(p, by_hand[n].detach(), rtol=1e-6, atol=1e-7)


def test_a_backend_that_knows_of_no_groups_refuses_them_in_one_line():
    task = make_task()
    task = type(task)(task.model, task.loss, Sgd(0.1, groups=[NO_DECAY]), 32, 96)
    with pytest.raises(BackendUnavailable, match=r"^backend=fused updates all .* no task\.optimizer\.groups$"):
        make_backend("fused", task, "bf16", torch.device("cpu"))
    with pytest.raises(InputError, match=r"^task\.optimizer\.groups=1: this backend .* expected named_parameters\(\)$"):
        task.optimizer.make(network().parameters())


def test_a_state_with_groups_is_loaded_by_a_backend_without_them_and_back():
    task = make_task()
    grouped = type(task)(task.model, task.loss, Sgd(0.1, 0.9, groups=[{"kind": "biases", "lr_factor": 2}]), 32, 96)
    device = torch.device("cpu")
    one, other = make_backend("amp", grouped, "bf16", device), make_backend("scratch", grouped, "bf16", device)
    x, y = make_batch(task, device)
    take_step(one, [(x, y)], 0.1)
    other.load_state_dict(one.state_dict())
    again = make_backend("amp", grouped, "bf16", device)
    again.load_state_dict(other.state_dict())
    for kind, tensors in one.state_dict()["optimizer"].items():
        for name, t in tensors.items():
            assert torch.equal(t, again.state_dict()["optimizer"][kind][name])
    for backend in (one, again):
        take_step(backend, [(x, y)], 0.05)
    assert all(torch.equal(p, again.master_params()[name]) for name, p in one.master_params().items())


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("vectors", "task.optimizer.groups=vectors: expected a list, as in [{kind: vectors, weight_decay: 0}]"),
        (["vectors"], "task.optimizer.groups[0]=vectors: expected a node of match, kind, lr_factor, weight_decay"),
        ([{"lr": 1}], "task.optimizer.groups[0]: key=lr: expected one of match, kind, lr_factor, weight_decay"),
        ([{}, {"kind": "norms"}], "task.optimizer.groups[1].kind=norms: expected one of vectors, biases"),
        ([{"lr_factor": 0}], "task.optimizer.groups[0].lr_factor=0: expected a finite number above 0"),
        ([{"weight_decay": -1}], "task.optimizer.groups[0].weight_decay=-1: expected a finite number of at least 0"),
        ([{"match": 3}], 'task.optimizer.groups[0].match=3: expected a pattern of names, or a list, as in ["head.*"]'),
    ],
)
def test_a_wrong_group_is_named(groups, message):
    with pytest.raises(InputError) as refused:
        AdamW(groups=groups)
    assert str(refused.value) == message


def test_a_group_that_takes_nothing_is_named():
    model = network()
    check_groups(AdamW(groups=[NO_DECAY]), model.named_parameters())
    for groups, number in (([{"match": "3.*"}], 0), ([NO_DECAY, {"kind": "biases"}], 1)):
        with pytest.raises(InputError, match=rf"^task\.optimizer\.groups\[{number}\]={{match: .*0\.weight, 0\.bias"):
            check_groups(AdamW(groups=groups), model.named_parameters())
