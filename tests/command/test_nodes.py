"""Objects that nodes of the configuration become, with every release of Hydra."""

from functools import partial
from types import SimpleNamespace

import pytest
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from support import nodes

from mpcompare.command.nodes import instantiate, task_of
from mpcompare.errors import InputError

LOSS = {"_target_": "support.nodes.loss", "_partial_": True}
NAMED = {"_target_": "support.nodes.named"}


def made(node):
    return instantiate(OmegaConf.create(node))


def test_a_step_calls_the_function_itself_and_not_one_that_hydra_checks():
    assert made(LOSS) is nodes.loss
    bound = made({**LOSS, "weight": 3.0})
    assert (type(bound), bound.func, bound.args, bound.keywords) == (partial, nodes.loss, (), {"weight": 3.0})
    assert type(made({**LOSS, "_args_": [1]})) is partial
    holder = made(
        {"_target_": "types.SimpleNamespace", "loss": LOSS, "more": [{**LOSS, "weight": 2.0}, {"deep": LOSS}]}
    )
    assert isinstance(holder, SimpleNamespace)
    assert holder.loss is holder.more[1]["deep"] is nodes.loss
    assert type(holder.more[0]) is partial


def test_what_a_constructor_raises_has_one_kind():
    with pytest.raises(InputError, match="^task.loss=3: expected less$"):
        made({"_target_": "support.nodes.refuses", "value": 3})
    with pytest.raises(InstantiationException, match="Error in call to target") as raised:
        made({"_target_": "support.nodes.fails"})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_an_argument_of_a_network_may_have_any_name():
    names = {name: name for name in ("function", "arguments", "named", "field", "node", "config")}
    task = {"_target_": "mpcompare.tasks.task.Task", "loss": "mse", "batch_size": 1, "model": {**NAMED, **names},
            "optimizer": {"_target_": "mpcompare.tasks.optimizers.Sgd"},
            "schedule": {"_target_": "mpcompare.tasks.schedules.Constant"}}  # fmt: skip
    assert task_of(OmegaConf.create(task)).model() == names
