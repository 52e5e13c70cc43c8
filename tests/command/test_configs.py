"""Every configuration composes and instantiates, and each backend has a configuration, a file and a row of a table."""

import re
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import hydra
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support.marks import slow_rows
from support.tasks import mlp_of

from mpcompare import backends
from mpcompare.command import nodes
from mpcompare.command.plan import SECTIONS
from mpcompare.contract import PHASES, options_of
from mpcompare.errors import InputError
from mpcompare.loss_scale import NoLossScale, StaticLossScale
from mpcompare.paths import CONF, CSRC
from mpcompare.tasks.any_optimizer import AnyOptimizer
from mpcompare.tasks.optimizers import OPTIMIZERS, Adam, AdamW, Sgd
from mpcompare.tasks.schedules import Constant, Cosine, Warmup
from mpcompare.tasks.task import Task

GROUPS = {group.name: sorted(p.stem for p in group.glob("*.yaml")) for group in CONF.iterdir() if group.is_dir()}


@pytest.fixture(autouse=True)
def hydra_context():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


FIRST = [(group, options[0]) for group, options in GROUPS.items() if options]
OTHERS = [(group, option) for group, options in GROUPS.items() for option in options[1:]]


@pytest.mark.parametrize(("group", "option"), [*FIRST, *slow_rows(OTHERS)])
def test_every_option_composes_and_instantiates(group, option):
    override = f"+{group}={option}" if group in ("experiment", "ablation") else f"{group}={option}"
    # A template needs the user's module or function, and reviews need a model with a vocabulary.
    needs = {
        "module": LINEAR,
        "function": ["data._target_=mpcompare.tasks.data.generated.digits"],
        "imdb": ["task=imdb_lstm"],
        "torch": LEFT["optimizer=torch"],
    }.get(option, [])
    cfg = compose("config", [*needs, override])
    cls = hydra.utils.get_class(cfg.backend._target_)
    assert set(PHASES) <= set(dir(cls)) or "train_step" in dir(cls)
    assert set(cfg.backend) - {"_target_"} == set(options_of(cls))
    task = nodes.task_of(cfg.task)
    assert isinstance(task, Task)
    assert any(True for _ in task.new_model(0, torch.device("cpu")).parameters())
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert callable(hydra.utils.instantiate(cfg.data))
    policy = hydra.utils.instantiate(cfg.loss_scale)
    policy = policy("fp16") if callable(policy) else policy
    assert isinstance(policy, (NoLossScale, StaticLossScale))


@pytest.mark.slow
def test_every_combination_of_backend_task_and_loss_scale_composes():
    for backend, task, scale in product(GROUPS["backend"], GROUPS["task"], GROUPS["loss_scale"]):
        compose("config", [f"backend={backend}", f"task={task}", f"loss_scale={scale}"])


# Values that an option leaves to the user.
LINEAR = ["task.model._target_=torch.nn.Linear", "+task.model.in_features=784", "+task.model.out_features=10"]
LEFT = {
    "task=module": LINEAR,
    "optimizer=torch": ["task.optimizer._target_=torch.optim.RAdam"],
}


def task_of(*overrides):
    overrides = [*overrides, *(value for each in overrides for value in LEFT.get(each, []))]
    return nodes.task_of(compose("config", overrides).task)


@pytest.mark.slow
def test_every_combination_of_task_optimizer_and_schedule_is_that_optimizer_and_that_schedule():
    chosen = {
        **{each.__name__.lower(): each() for each in OPTIMIZERS}, "torch": AnyOptimizer("torch.optim.RAdam"),
        "momentum": Sgd(momentum=0.9), "nesterov": Sgd(momentum=0.9, nesterov=True),
    }  # fmt: skip
    schedules = {"constant": Constant(), "warmup": Warmup(10), "cosine": Cosine()}
    assert {"task", *chosen} == set(GROUPS["optimizer"])
    assert {"task", *schedules} == set(GROUPS["schedule"])
    for name in GROUPS["task"]:
        own = task_of(f"task={name}").optimizer
        for optimizer, schedule in product(GROUPS["optimizer"], GROUPS["schedule"]):
            task = task_of(f"task={name}", f"optimizer={optimizer}", f"schedule={schedule}")
            expected = chosen.get(optimizer, own)
            lr = own.lr if isinstance(expected, Sgd) else expected.lr  # SGD's is the task's, Adam's is torch's
            assert task.optimizer == replace(expected, lr=lr)
            assert task.schedule == schedules.get(schedule, Constant())


@pytest.mark.parametrize("optimizer", GROUPS["optimizer"])
def test_the_command_line_has_the_last_word_on_an_optimizer(optimizer):
    found = task_of(f"optimizer={optimizer}", "task.optimizer.lr=0.5", "task.optimizer.weight_decay=0.25").optimizer
    assert (found.lr, found.weight_decay) == (0.5, 0.25)


@pytest.mark.slow
def test_the_command_line_has_the_last_word_on_what_one_optimizer_or_schedule_takes():
    assert task_of("optimizer=sgd", "task.optimizer.momentum=0.5").optimizer == Sgd(0.01, 0.5)
    assert task_of("optimizer=adamw", "task.optimizer.betas=[0.8,0.9]").optimizer == AdamW(betas=(0.8, 0.9))
    assert task_of("schedule=cosine", "task.schedule.steps=9").schedule == Cosine(9)


OWN = """
_target_: mpcompare.tasks.task.Task
model: {_target_: torch.nn.Linear, in_features: 784, out_features: 10}
loss: cross_entropy
batch_size: 8
"""
OWN_SGD = "optimizer: {_target_: mpcompare.tasks.optimizers.Sgd, lr: 0.25, momentum: 0.5}\n"
OWN_ADAM = "optimizer: {_target_: mpcompare.tasks.optimizers.Adam, lr: 0.25, eps: 0.5}\n"
OWN_WARMUP = "schedule: {_target_: mpcompare.tasks.schedules.Warmup, steps: 7}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "overrides", "expected"),
    [
        (OWN_SGD, [], (Sgd(0.25, 0.5), Constant())),
        (OWN_SGD + OWN_WARMUP, [], (Sgd(0.25, 0.5), Warmup(7))),
        (OWN_SGD + OWN_WARMUP, ["schedule=cosine"], (Sgd(0.25, 0.5), Cosine())),
        (OWN_SGD + OWN_WARMUP, ["schedule=constant"], (Sgd(0.25, 0.5), Constant())),
        (OWN_SGD, ["optimizer=adamw"], (AdamW(), Constant())),
        (OWN_SGD, ["optimizer=sgd"], (Sgd(0.25), Constant())),
        (OWN_ADAM, ["optimizer=adamw"], (AdamW(), Constant())),
        ("", ["optimizer=adam"], (Adam(), Constant())),
        ("optimizer: {lr: 0.25}\ndefaults: [/optimizer/adamw, _self_]", [], (AdamW(0.25), Constant())),
        (OWN_ADAM, ["optimizer=sgd", "~task.optimizer.eps"], (Sgd(0.25), Constant())),
    ],
)
def test_a_task_of_the_users_brings_its_own_or_takes_the_chosen_one(tmp_path, lines, overrides, expected):
    found = task_of(*own_task(tmp_path, lines), *overrides)
    assert (found.optimizer, found.schedule) == expected


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch.nn.Linaer", "torch.nn has no Linaer (did you mean Linear?)"),
        ("mpcompare.tsks.mlp.Mlp", "mpcompare has no tsks (did you mean tasks?)"),
        ("nobody.Net", "there is no module nobody"),
        (
            "torch.nn.Linear",
            "missing a required argument: 'in_features': its arguments are set as +task.model.KEY=VALUE",
        ),
    ],
)
def test_what_is_wrong_with_the_node_of_a_network_is_said_before_one_is_made(target, said):
    task = {**compose("config", []).task, "model": {"_target_": target}}
    with pytest.raises(InputError) as refused:
        nodes.task_of(OmegaConf.create(task))
    assert str(refused.value) == f"task.model._target_={target}: {said}"


@pytest.mark.parametrize(
    ("lines", "overrides", "message"),
    [
        (
            OWN_ADAM,
            ["optimizer=sgd"],
            "task.optimizer.eps=0.5: Sgd takes lr, momentum, nesterov, weight_decay, groups; "
            "leave it out with ~task.optimizer.eps",
        ),
        (
            OWN_SGD,
            ["task.optimizer._target_=mpcompare.tasks.optimizers.AdamW"],
            "task.optimizer.momentum=0.5: AdamW takes lr, betas, eps, weight_decay, groups; "
            "leave it out with ~task.optimizer.momentum",
        ),
        (
            OWN_SGD,
            ["+task.schedule.steps=3"],
            "task.schedule.steps=3: Constant takes nothing; leave it out with ~task.schedule.steps",
        ),
        (
            "",
            ["optimizer=torch"],
            "task.optimizer._target_=???: expected the dotted name of a class, such as torch.optim.RAdam",
        ),
        (
            "",
            ["optimizer=torch", "task.optimizer._target_=torch.optim.Radam"],
            "task.optimizer._target_=torch.optim.Radam: torch.optim has no Radam (did you mean RAdam?)",
        ),
        (
            OWN_SGD,
            ["task.optimizer._target_=torch.optim.RMSprop", "+task.optimizer.betas=[0,0]"],
            "task.optimizer.betas=[0, 0]: RMSprop takes params, lr, alpha, eps, weight_decay, momentum, centered, "
            "capturable, foreach, maximize, differentiable; leave it out with ~task.optimizer.betas",
        ),
        (
            "",
            [],
            f"task.optimizer={{}}: expected the _target_ of one; optimizer={'|'.join(GROUPS['optimizer'])} chooses one",
        ),
    ],
)
def test_what_an_optimizer_does_not_take_is_said_in_one_line(tmp_path, lines, overrides, message):
    with pytest.raises(InputError) as said:
        nodes.task_of(compose("config", [*own_task(tmp_path, lines), *overrides]).task)
    assert str(said.value) == message


def own_task(folder, lines):
    """Returns the overrides that choose a task of the user, with these lines in addition to the usual ones."""
    (folder / "task").mkdir()
    (folder / "task" / "mine.yaml").write_text(OWN + lines)
    return [f"hydra.searchpath=[file://{folder}]", "task=mine", "data=digits"]


def test_a_backend_is_a_config_a_file_and_a_row_of_the_documents():
    others = {"__init__", "torch_model", "loop", "mistakes", "real_bugs"}
    files = {p.stem for p in Path(backends.__file__).parent.glob("*.py")} - others
    page = (CONF.parent / "docs" / "backends.md").read_text().split("<!-- numbers: options")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    peers = {p.stem for p in Path(backends.__file__).parent.glob("peers/*.py")} - {"__init__", "library"}
    page = (CONF.parent / "docs" / "peers.md").read_text()
    described = set(re.findall(r"^\| `(\w+)` \|", page.split("## Rows")[1].split("\n## ")[0], re.MULTILINE))
    assert (files, peers) == (rows, described)
    assert files == named_in_readme()
    assert set(GROUPS["backend"]) == files | peers
    for name in files | peers:
        module = f"mpcompare.backends.{'peers.' if name in peers else ''}{name}"
        config = OmegaConf.load(CONF / "backend" / f"{name}.yaml")  # it composes: the first test
        assert config._target_.startswith(f"{module}.")


def test_each_library_has_an_extra_of_its_name():
    project = (CONF.parent / "pyproject.toml").read_text()
    sources = "".join(p.read_text() for p in Path(backends.__file__).parent.glob("peers/*.py"))
    libraries = set(re.findall(r'library\("[\w.]+", "(\w+)"\)', sources))
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert libraries <= set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
    assert f"mpcompare[{','.join(sorted(libraries))}]" in extras


def named_in_readme():
    """Returns the names in the first column of the README's table of backends."""
    readme = (CONF.parent / "README.md").read_text()
    table = readme.partition("| backend | ")[2].partition("\n\n")[0]
    firsts = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for first in firsts for name in re.findall(r"`(\w+)`", first)}


def test_a_task_is_a_config_a_row_of_its_page_and_named_in_the_readme():
    page = (CONF.parent / "docs" / "tasks.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page.partition("## The parts")[0], re.MULTILINE))
    readme = (CONF.parent / "README.md").read_text().partition("A [task]")[2].partition("\n\n")[0]
    assert set(GROUPS["task"]) == rows == set(re.findall(r"`(\w+)`", readme))


def test_the_task_brings_its_data_and_the_command_line_has_the_last_word():
    assert "auto" in compose("config", []).data._target_
    assert "synthetic" in compose("config", ["task=recipe_mlp"]).data._target_
    assert "digits" in compose("config", ["task=recipe_mlp", "data=digits"]).data._target_


@pytest.mark.slow
def test_defaults_are_the_ones_that_are_documented():
    cfg = compose("config", [])
    task = nodes.task_of(cfg.task)
    assert mlp_of(task).sizes == (784, 8192, 10)
    assert (task.batch_size, task.optimizer, task.loss, cfg.train.steps, cfg.train.warmup_steps) == (
        8192, Sgd(0.01), "cross_entropy", 20, 3,
    )  # fmt: skip
    recipe = nodes.task_of(compose("config", ["task=recipe_mlp"]).task)
    assert mlp_of(recipe).sizes == (4096,) * 4
    assert (recipe.batch_size, recipe.optimizer, recipe.loss, recipe.samples) == (512, Sgd(0.001), "mse", 50 * 512)


def test_a_knob_of_a_section_is_a_field_of_the_plan():
    cfg = compose("config", [])
    for name, section in SECTIONS.items():
        assert list(cfg[name]) == [field.name for field in fields(section)]
        assert section(**cfg[name])  # the defaults are accepted


def test_every_experiment_opens_with_the_command_that_runs_it():
    for name in GROUPS["experiment"]:
        text = (CONF / "experiment" / f"{name}.yaml").read_text()
        assert f"# python -m mpcompare +experiment={name}" in text.splitlines()[:3]


@pytest.mark.slow
def test_the_first_look_asks_the_question_of_the_default_task_at_a_smaller_size():
    cfg = compose("config", ["+experiment=first_look"], return_hydra_config=True)
    assert str(cfg.hydra.mode).endswith("MULTIRUN")
    assert cfg.hydra.sweeper.params.backend == "scratch,amp,fp32"
    small, default = (nodes.task_of(each.task) for each in (cfg, compose("config", [])))
    assert (mlp_of(small).sizes, small.batch_size) == ((784, 1024, 10), 1024)
    assert (small.loss, small.optimizer, small.schedule) == (default.loss, default.optimizer, default.schedule)
    assert cfg.verdict == compose("config", []).verdict
    assert compose("config", ["+experiment=first_look", "task.batch_size=8"]).task.batch_size == 8


def test_the_ablations_are_swept_all_of_them_each_from_the_defaults():
    cfg = compose("config", ["+experiment=ablations"], return_hydra_config=True)
    assert str(cfg.hydra.mode).endswith("MULTIRUN")
    assert sorted(cfg.hydra.sweeper.params["+ablation"].split(",")) == GROUPS["ablation"]
    complete = {
        "_target_": "mpcompare.backends.scratch.Scratch", "engine": "auto", "master_params": True,
        "accumulate_dtype": "fp32", "softmax": "fp32",
    }  # fmt: skip
    assert OmegaConf.to_container(compose("config", []).backend, resolve=True) == complete
    taken_away = {
        "none": {}, "no_master_params": {"master_params": False}, "no_loss_scale": {},
        "accumulate_fp16": {"accumulate_dtype": "fp16"}, "softmax_fp16": {"softmax": "fp16"},
    }  # fmt: skip
    assert {"amp", *taken_away} == set(GROUPS["ablation"])
    for name, options in taken_away.items():
        cfg = compose("config", ["+experiment=ablations", f"+ablation={name}"])
        backend = OmegaConf.to_container(cfg.backend, resolve=True)
        assert backend == {**complete, **options}
        policy = hydra.utils.instantiate(cfg.loss_scale)
        assert (callable(policy), cfg.precision) == (name != "no_loss_scale", "fp16")
    assert compose("config", ["+experiment=ablations", "+ablation=amp"]).backend._target_.endswith("Amp")
    assert compose("config", ["+experiment=ablations", "+ablation=none", "precision=bf16"]).precision == "bf16"


def test_every_knob_is_explained():
    for path in CONF.rglob("*.yaml"):
        assert path.read_text().startswith("#"), path


def test_dynamic_loss_scale_has_grad_scalers_keys_and_defaults():
    cfg = OmegaConf.to_container(compose("config", ["loss_scale=dynamic"]).loss_scale)
    import torch

    state = torch.amp.GradScaler("cpu").state_dict()
    theirs = {
        "init_scale": state["scale"],
        **{k: state[k] for k in ("growth_factor", "backoff_factor", "growth_interval")},
    }
    assert {k: cfg[k] for k in theirs} == theirs


def test_native_sources_are_where_the_build_looks():
    assert (CSRC / "ops.cpp").is_file()
    assert {p.stem for p in CSRC.glob("cuda/*.cu")} == {p.stem for p in CSRC.glob("cpu/*.cpp")}  # mirrored names
