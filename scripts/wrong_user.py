"""Mistakes of users: data, networks and losses, one of each kind. ``wrong_inputs.py`` tries them all."""

import sys
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

X, Y = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
_AT = (torch.tensor(5), torch.tensor(2))
NAN, INF, HUGE = (X.index_put(_AT, torch.tensor(value)) for value in (np.nan, np.inf, 1e30))

# By name what a data function returns, and the line that it must be.
DATA: dict[str, tuple[Any, str]] = {
    "nothing": (None, "expected a Dataset, or the tensors"),
    "number": (5, "expected a Dataset, or the tensors"),
    "two": ((X, Y), "expected a Dataset, or the tensors"),
    "five": ((X, Y, X, Y, X), "expected a Dataset, or the tensors"),
    "words": ("abcd", "expected a Dataset, or the tensors"),
    "table": ({"x": X}, "expected a Dataset, or the tensors"),
    "lists": ((X.tolist(), Y, X, Y), "x_train[0][0] is a float"),
    "text": ((X, "y", X, Y), "y_train is a str"),
    "none": ((X, Y, None, Y), "x_test is a NoneType"),
    "strings": ((X, np.array(["a"] * 64), X, Y), "y_train is a ndarray <U1"),
    "objects": ((X, np.array([None] * 64), X, Y), "y_train is a ndarray object"),
    "sparse": ((X.to_sparse(), Y, X, Y), "x_train is a Tensor torch.float32"),
    "complex": ((X.to(torch.complex64), Y, X, Y), "x_train is a Tensor torch.complex64"),
    "meta": ((X.to("meta"), Y, X, Y), "x_train is a Tensor torch.float32"),
    "scalar": ((X.sum(), Y, X, Y), "x_train has shape []"),
    "empty": ((X[:0], Y[:0], X, Y), "x_train has shape [0, 4]"),
    "no_features": ((X[:, :0], Y, X, Y), "x_train has shape [64, 0]"),
    "no_test": ((X, Y, X[:0], Y[:0]), "x_test has shape [0, 4]"),
    "short": ((X, Y[:60], X, Y), "has 64 samples in x_train, and 60 in y_train"),
    "short_test": ((X, Y, X[:9], Y), "has 9 samples in x_test, and 64 in y_test"),
    "narrow_test": ((X, Y, X[:, :3], Y), "x_test has samples [3] float32, and x_train [4] float32"),
    "double_test": ((X, Y, X.double(), Y), "x_test has samples [4] float64, and x_train [4] float32"),
    "real_test": ((X, Y, X, Y.float()), "y_test has samples [] float32, and y_train [] int64"),
}
# By name what a data function returns that no network here can be trained on, and the whole line.
UNFIT: dict[str, tuple[Any, str]] = {
    "a_nan": ((NAN, Y, X, Y), "data=unfit: x_train, sample 5, feature 2 is nan: expected finite numbers whose"),
    "an_inf": ((INF, Y, X, Y), "data=unfit: x_train, sample 5, feature 2 is inf: expected"),
    "huge": ((HUGE, Y, X, Y), "data=unfit: x_train, sample 5, feature 2 is 1e+30, whose square fp32 does not hold"),
    "nan_test": ((X, Y, NAN, Y), "data=unfit: x_test, sample 5, feature 2 is nan: expected"),
    "many_labels": ((X, torch.arange(64), X, Y), "task.loss=cross_entropy: cannot be taken of"),
    "test_labels": ((X, Y, X, torch.arange(64)), "task.loss=cross_entropy: cannot be taken of"),
    "negative": ((X, Y - 1, X, Y), "task.loss=cross_entropy: cannot be taken of"),
    "wide": ((X.repeat(1, 2), Y, X.repeat(1, 2), Y), "task.model=Net: cannot be called with data=unfit, inputs [4, 8]"),
    "whole": ((X.long(), Y, X.long(), Y), "task.model=Net: cannot be called with data=unfit, inputs [4, 4] int64"),
    "few": ((X[:8], Y[:8], X, Y), "task.batch_size=16: data=unfit has only 8 samples"),
}


def good(seed: int) -> Any:
    """Returns data on which a network can be trained."""
    return X, Y, X, Y


def load(seed: int, name: str) -> Any:
    """Returns what a user's function returns."""
    return DATA[name][0]


def unfit(seed: int, name: str) -> Any:
    """Returns data that no network here can be trained on."""
    return UNFIT[name][0]


def raises(seed: int) -> Any:
    raise RuntimeError("no such\nfile")


def exits(seed: int) -> Any:
    sys.exit(3)


class Net(nn.Sequential):
    """A network that can be trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def network(name: str) -> Any:
    """Returns a network of ``NETWORKS``."""
    return NETWORKS[name][0]()


class Wrong(Net):
    """A network whose output is changed."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(self, super().forward(x))


def _with(**attributes: Any) -> nn.Module:
    net = Net()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


def _grown(net: nn.Module, output: Tensor) -> Tensor:
    net.more = nn.Parameter(torch.zeros(2))
    return output + net.more


def _inferred() -> nn.Module:
    with torch.inference_mode():
        return Net()


# By name a maker of a network, and a part of the line that it must be, after ``task.model``.
NETWORKS: dict[str, tuple[Any, str]] = {
    "none": (lambda: None, "NoneType: expected a torch.nn.Module"),
    "function": (lambda: torch.relu, "expected a torch.nn.Module"),
    "raises": (lambda: 1 / 0, "cannot be made (ZeroDivisionError"),
    "exits": (lambda: sys.exit(3), "cannot be made (SystemExit"),
    "no_parameters": (nn.ReLU, "ReLU: has no parameters to train"),
    "frozen": (lambda: Net().requires_grad_(False), "Net: has no parameters to train"),
    "half": (lambda: Net().half(), "is torch.float16: expected fp32, in which"),
    "double": (lambda: Net().double(), "is torch.float64: expected fp32, in which"),
    "lazy": (lambda: nn.LazyLinear(2), "parameter weight is lazy"),
    "empty": (lambda: _with(more=nn.Parameter(torch.zeros(0))), "parameter more is of shape [0]"),
    "sparse": (lambda: _with(more=nn.Parameter(torch.eye(2).to_sparse())), "parameter more is torch.sparse_coo"),
    "meta": (lambda: nn.Linear(4, 2, device="meta"), "parameter weight is on the device meta"),
    "inference": (_inferred, "made in torch.inference_mode()"),
    "lock": (lambda: _with(lock=threading.Lock()), "Net: cannot be copied (TypeError"),
    "open": (lambda: _with(file=open(__file__)), "Net: cannot be copied (TypeError"),  # noqa: PTH123, SIM115
    "detached": (lambda: Wrong(lambda _, y: y.detach()), "Wrong: returns an output without gradient"),
    "array": (lambda: Wrong(lambda _, y: y.detach().numpy()), "Wrong: returns a ndarray: expected tensors"),
    "grown": (lambda: Wrong(_grown), "Wrong: makes its parameter more in forward"),
    "called": (lambda: Wrong(lambda *_: 1 / 0), "Wrong: cannot be called with data=good"),
    "ended": (lambda: Wrong(lambda *_: sys.exit(3)), "Wrong: cannot be called with data=good"),
    "narrow": (lambda: nn.Linear(5, 2), "Linear: cannot be called with data=good, inputs [4, 4] float32"),
}


def loss(output: Tensor, target: Tensor, name: str) -> Any:
    """Returns a loss of ``LOSSES``."""
    return LOSSES[name][0](output, target)


# By name a loss, and a part of the line that it must be, after ``task.loss``.
LOSSES: dict[str, tuple[Any, str]] = {
    "none": (lambda *_: None, "gives NoneType for"),
    "number": (lambda *_: 1.0, "gives float for"),
    "vector": (lambda output, _: output.sum(1), "gives a tensor [4] for"),
    "detached": (lambda output, _: output.detach().sum(), "gives a value without gradient"),
    "raises": (lambda *_: 1 / 0, "cannot be taken of data=good"),
    "exits": (lambda *_: sys.exit(3), "cannot be taken of data=good"),
}
