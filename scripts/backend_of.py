"""The task, data and backends that scripts measure: the default network in any size, and backends from conf/."""

from functools import partial
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn

from mpcompare.contract import Backend, BackendUnavailable
from mpcompare.instruments import fp32_products
from mpcompare.loss_scale import auto
from mpcompare.paths import CONF
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.data import Dataset, generated, mnist
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task

DATA = ("auto", "mnist", "digits")


def mnist_mlp(batch_size: int, hidden: int) -> Task:
    """Returns the task 784 -> ``hidden`` -> 10, trained as the default task is."""
    return Task(partial(Mlp, 784, [hidden], 10), "cross_entropy", Sgd(lr=0.01, momentum=0.0), batch_size)


def load(data: str, batch_size: int) -> Dataset:
    """Returns one of the data sets ``DATA``, on the CPU; digits have up to 8 batches."""
    samples = min(60000, 8 * batch_size)
    if data == "mnist":
        return mnist.mnist(0)
    return mnist.auto(0, samples) if data == "auto" else generated.digits(0, samples)


def make_backend(name: str, precision: str, model: nn.Module, task: Task, **changes: Any) -> Backend:
    """Returns the backend that ``conf/backend/NAME.yaml`` describes.

    TF32 is a switch of the process; it is set as ``precision`` needs it.

    Args:
        changes: values of options, by name. Options that this backend does not have are ignored.

    Raises:
        BackendUnavailable: there is no such file, or the backend cannot be made here.
    """
    if not (CONF / "backend" / f"{name}.yaml").exists():
        raise BackendUnavailable(f"there is no conf/backend/{name}.yaml")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        configured: Any = OmegaConf.to_container(compose("config", [f"backend={name}"]).backend, resolve=True)
    cls = hydra.utils.get_class(configured.pop("_target_"))
    options = {key: changes.get(key, value) for key, value in configured.items()}
    fp32_products.set_tf32(PRECISIONS[precision].uses_tf32)
    return cls(model, task, precision, auto(precision), **options)
