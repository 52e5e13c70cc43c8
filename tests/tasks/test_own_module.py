"""Networks and data of a user's package, by their dotted names, and networks that cannot be compared."""

import json

import pytest
import torch
from support.marks import slow_rows
from support.tasks import make_task
from torch import nn

from mpcompare.errors import InputError
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task, buffers_of, params_of, with_values
from mpcompare.tasks.trial import try_out

CPU = torch.device("cpu")
PACKAGE = """
import torch
from torch import nn

class Net(nn.Module):
    '''Embedding, a tied output layer, batch norm.'''
    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.output = nn.Linear(width, 11)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        h = self.norm(self.embedding(x).transpose(1, 2)).transpose(1, 2)
        return self.output(h)

class NoParameters(nn.Module):
    def forward(self, x):
        return x.float()

def load(seed, length=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(11, (64, length), generator=generator)
    y = (x + 1) % 11
    return x[:48], y[:48], x[48:], y[48:]

def two_numbers(output, y):
    return output.mean(dim=(0, 1))[:2]

def smoothed(output, y):
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten(), label_smoothing=0.1)
"""
SMALL = ("task=module", "task.model._target_=my_package.Net", "data=function", "data._target_=my_package.load",
         "task.batch_size=16", "train.steps=4", "train.warmup_steps=1", "measure.budget_s=0.2", "measure.block_s=0.01",
         "verdict.noise=1")  # fmt: skip


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "my_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.slow
def test_a_module_and_data_of_ones_own_are_compared_without_a_yaml(cli, tmp_path, package):
    folder = tmp_path / "sweep"
    ended = cli("-m", "backend=amp,fp32,master_weights,scratch", *SMALL, "+task.model.width=12", "precision=auto",
                "hydra/launcher=basic", f"hydra.sweep.dir={folder}")  # fmt: skip
    assert ended.code == 1  # scratch trains MLPs, and its row says so
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    assert results["3-scratch-auto"]["error"].startswith("backend=scratch trains MLPs (Linear, ReLU, ..., Linear)")
    assert results["3-scratch-auto"]["error"].endswith("not this Net")
    assert {r["status"] for name, r in results.items() if "scratch" not in name} == {"ok"}
    assert results["0-amp-auto"]["dataset"] == "load"
    assert results["0-amp-auto"]["test_accuracy"] is not None
    numerics = json.loads((folder / "2-master_weights-auto" / "numerics.json").read_text())
    assert list(numerics["first"]["finite"]["gradients"]) == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "output.bias",
    ]
    assert list(numerics["first"]["buffers"]) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    verdicts = json.loads((folder / "report" / "verdict.json").read_text())
    assert verdicts["2-master_weights-auto"]["word"] == "same", verdicts["2-master_weights-auto"]["because"]


QUICK = [
    (
        "task.model._target_=no_such_package.Net",
        "task.model._target_=no_such_package.Net: there is no module no_such_package",
    ),
    ("task.model._target_=my_package.NoParameters", "task.model=NoParameters: has no parameters to train"),
    ("task.loss={_target_: my_package.two_numbers, _partial_: true}", "gives a tensor [2] for data=load"),
]
SLOW = [
    ("task.model._target_=my_package.Nothing", "task.model._target_=my_package.Nothing: my_package has no Nothing"),
    ("task.model._target_=my_package.Nett", "my_package.Nett: my_package has no Nett (did you mean Net?)"),
    ("+task.model.widht=3", "task.model.widht=3: Net takes width (did you mean width?); leave it out with ~task"),
    ("task.model._target_=my_package.load", "my_package.load: missing a required argument: 'seed': its arguments"),
    ("data._target_=my_package.laod", "data._target_=my_package.laod: my_package has no laod (did you mean load?)"),
    (
        "task.loss={_target_: my_package.smothed, _partial_: true}",
        "task.loss._target_=my_package.smothed: my_package has no smothed (did you mean smoothed?)",
    ),
    (
        "task.loss=huber",
        "task.loss=huber: expected one of cross_entropy, masked_cross_entropy, mse, model, or",
    ),
    ("task.loss=mse", "task.loss=mse: cannot be taken of data=load"),
    ("task.batch_size=49", "task.batch_size=49: data=load has only 48 samples"),
    ("task.optimizer.lr=0", "task.optimizer.lr=0: expected a finite number above 0"),
]


@pytest.mark.parametrize(("override", "message"), [*QUICK, *slow_rows(SLOW)])
def test_what_cannot_be_compared_is_one_line(cli, package, override, message):
    key = override.split("=")[0]
    ended = cli("backend=fp32", *(o for o in SMALL if o.split("=")[0] != key), override)
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1


@pytest.mark.slow
def test_another_loss_is_a_callable_by_name(cli, tmp_path, package):
    ended = cli("backend=amp", *SMALL, "task.loss={_target_: my_package.smoothed, _partial_: true}",
                f"hydra.run.dir={tmp_path / 'run'}")  # fmt: skip
    assert ended.code == 0, ended.err


def module_task(model: nn.Module, loss: object = "cross_entropy") -> Task:
    return Task(lambda: model, loss, Sgd(0.1), 4)  # type: ignore[arg-type]


class Turns(nn.Module):
    """It has a layer of 16 bits that is not trained, and complex weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4).half().requires_grad_(False)
        self.turns = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x):
        return (self.first(x.to(self.first.weight.dtype)).to(torch.complex64) @ self.turns).real


def test_a_network_that_a_function_returns_again_and_again_stays_as_it_is():
    own = Turns().eval()
    task = module_task(own)
    network = task.new_model(0, torch.device("cpu"))
    assert (network.training, network.first.weight.dtype) == (True, torch.float32)
    assert (own.training, own.first.training, own.first.weight.dtype) == (False, False, torch.float16)
    assert (type(own), own.turns.dtype) == (Turns, torch.complex64)
    with torch.no_grad():
        network.first.weight.add_(1)
    assert not torch.equal(task.new_model(0, torch.device("cpu")).first.weight, network.first.weight)


class Noisy(nn.Linear):
    """Adds numbers of a generator that no seed of torch's reaches."""

    generator = torch.Generator()

    def forward(self, x):
        return super().forward(x) + torch.rand((), generator=self.generator)


class DropsForEver(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


class MakesLayers(nn.Linear):
    """Makes a layer, and so draws weights, in its first call."""

    made = False

    def forward(self, x):
        if not self.made:
            self.made = bool(nn.Linear(3, 3))
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 4).half(), "parameter weight is torch.float16: expected fp32, in which"),
        (nn.Linear(3, 4).requires_grad_(False), "has no parameters to train"),
    ],
)
def test_a_network_that_nobody_could_compare_is_refused(model, message):
    with pytest.raises(InputError, match=message):
        module_task(model).new_model(0, CPU)


def test_samples_that_do_not_fit_the_network_or_the_loss_are_named():
    x, classes, real = torch.randn(8, 3), torch.randint(5, (8,)), torch.randn(8, 5)
    classes[7] = 4
    for model, loss, y, message in (
        (
            nn.Linear(2, 5),
            "cross_entropy",
            classes,
            r"task.model=Linear: cannot be called with data=d, inputs \[4, 3\]",
        ),
        (
            nn.Linear(3, 4),
            "cross_entropy",
            classes,
            "labels go up to 4, and the last dimension of the output has 4 classes",
        ),
        (nn.Linear(3, 5), "cross_entropy", real, "targets are real numbers"),
        (nn.Linear(3, 5), "mse", classes, "targets are classes"),
        (nn.Linear(3, 4), "mse", real, "expected the output's shape to be the targets'"),
        (Noisy(3, 5), "cross_entropy", classes, "draws random numbers that torch.manual_seed does not repeat"),
        (MakesLayers(3, 5), "cross_entropy", classes, "draws other random numbers in its first call than in later"),
        (DropsForEver(3, 5), "cross_entropy", classes, "drops numbers in evaluation mode, too: F.dropout wants"),
        (nn.LSTM(3, 5), "cross_entropy", classes, "task.loss=cross_entropy: LSTM returns a tuple: expected model"),
    ):
        with pytest.raises(InputError, match=message) as refused:
            try_out(model, module_task(model, loss), x, y, "d")
        assert len(str(refused.value).splitlines()) == 1
    plain, dropping = nn.Linear(3, 5), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 5))
    before = torch.random.get_rng_state()
    for right in (plain, dropping):
        try_out(right, module_task(right), x, classes, "d")
    assert dropping.training
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_network_is_drawn_from_its_seed_and_copied_with_other_values():
    task = make_task()
    a, again, other = (task.new_model(seed, CPU) for seed in (0, 0, 1))
    before = torch.random.get_rng_state()
    task.new_model(3, CPU)
    assert torch.equal(before, torch.random.get_rng_state())  # the global generator is left as it was
    assert all(torch.equal(p, params_of(again)[name]) for name, p in params_of(a).items())
    assert not torch.equal(a.layer1.weight, other.layer1.weight)

    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    params = {name: p + 1 for name, p in params_of(network).items()}
    buffers = {"1.running_mean": torch.ones(4)}
    changed = with_values(network, params, buffers)
    assert torch.equal(changed[0].weight, network[0].weight + 1)
    assert torch.equal(buffers_of(changed)["1.running_mean"], torch.ones(4))
    assert torch.equal(network[1].running_mean, torch.zeros(4))
