"""Data of a user's own function, and numbers in it on which nothing can be trained."""

import math
import sys

import numpy as np
import pytest
import torch

from mpcompare.errors import InputError
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.given import LARGEST, dataset_of, load, not_finite

X, Y = torch.randn(8, 3), torch.arange(8) % 2


def test_arrays_of_numpy_are_taken_in_torchs_own_types():
    data = dataset_of((X.double().numpy(), Y.int().numpy(), X.numpy()[::2], Y.to(torch.uint8).numpy()[::2]), "load")
    assert (data.name, data.reason) == ("load", "asked for")
    assert torch.equal(data.x_train, X)
    assert torch.equal(data.x_test, X[::2])
    assert torch.equal(data.y_test, Y[::2])
    assert (data.y_train.dtype, data.y_test.dtype) == (torch.int64, torch.int64)
    big_endian = dataset_of((X.numpy().astype(">f8"), Y, X, Y), "load")
    assert torch.equal(big_endian.x_train, X)
    backwards = dataset_of((X.numpy()[::-1].astype(np.longdouble), Y, X, Y), "load")
    assert torch.equal(backwards.x_train, X.flip(0))


@pytest.mark.filterwarnings("error")
def test_an_array_that_nobody_may_write_is_taken_without_a_warning():
    x = X.numpy().copy()
    x.flags.writeable = False
    assert torch.equal(dataset_of((x, Y, X, Y), "load").x_train, X)


def test_targets_of_torch_are_taken_in_the_types_of_torchs_losses():
    for given, taken in ((Y.to(torch.uint8), torch.int64), (X.double(), torch.float32), (X.half(), torch.float32)):
        data = dataset_of((X, given, X, given), "load")
        assert torch.equal(data.y_train, given.to(taken))
        assert data.y_train.dtype is taken
    data = dataset_of((X.int(), Y > 0, X.int(), Y > 0), "load")
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.int32, torch.bool)  # inputs and masks stay


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        (5, "expected a Dataset, or the tensors x_train, y_train, x_test, y_test"),
        ((X, Y), "expected a Dataset, or the tensors x_train, y_train, x_test, y_test"),
        ((X.tolist(), Y, X, Y), "x_train[0][0] is a float: expected a tensor or a numpy array of numbers"),
        (("x", Y, X, Y), "x_train is a str: expected a tensor or a numpy array of numbers"),
        ((X, None, X, Y), "y_train is a NoneType: expected a tensor or a numpy array of numbers"),
        ((X, np.array(["a"] * 8), X, Y), "y_train is a ndarray <U1: expected a tensor or a numpy array of numbers"),
        ((X.to_sparse(), Y, X, Y), "x_train is a Tensor torch.float32: expected a tensor or a numpy array of numbers"),
        ((X, Y[:7], X, Y), "has 8 samples in x_train, and 7 in y_train: expected as many"),
        ((X, Y, X, Y[:7]), "has 8 samples in x_test, and 7 in y_test: expected as many"),
        ((X, Y, X[:0], Y[:0]), "x_test has shape [0, 3]: expected samples, at least one"),
        ((X, Y, np.array(1.0), Y), "x_test has shape []: expected samples, at least one"),
        ((X, Y, X[0, 0], Y), "x_test has shape []: expected samples, at least one"),
        ((X, Y, X[:, :2], Y), "x_test has samples [2] float32, and x_train [3] float32"),
        ((X, Y, X, Y.float()), "y_test has samples [] float32, and y_train [] int64"),
        (Dataset("d", "", X, Y, X, Y[:1]), "has 8 samples in x_test, and 1 in y_test: expected as many"),
    ],
)
def test_what_is_no_data_is_one_line(loaded, said):
    with pytest.raises(InputError) as refused:
        dataset_of(loaded, "load")
    assert str(refused.value) in (f"data._target_=load: {said}", f"data._target_=d: {said}")


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda seed: 1 / 0, "raises ZeroDivisionError: division by zero"),
        (lambda seed: sys.exit(3), r"calls sys.exit\(3\)"),
    ],
)
def test_a_function_that_fails_says_where(fails, said):
    with pytest.raises(InputError, match=rf"data._target_=<lambda>: {said} \(.*test_given.py, line \d+\)"):
        load(fails, 0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "x_train, sample 5, feature 2 is nan"),
        (math.inf, "x_train, sample 5, feature 2 is inf"),
        (-math.inf, "x_train, sample 5, feature 2 is -inf"),
        (1e30, "x_train, sample 5, feature 2 is 1e+30, whose square fp32 does not hold (at most 1.8e+19)"),
        (LARGEST / 2, ""),
    ],
)
def test_the_first_number_that_is_not_finite_is_named(value, said):
    x = X.clone()
    x[5, 2] = value
    assert not_finite(Dataset("d", "", x, Y, X, Y)) == said


def test_numbers_that_are_not_finite_are_counted_and_found_in_any_part():
    x, y = torch.zeros(4, 1, 2, 2), torch.zeros(4)
    assert not_finite(Dataset("d", "", x, y, x, y)) == ""
    wrong = x.clone()
    wrong[2:, 0, 1, 0] = math.nan
    assert not_finite(Dataset("d", "", x, y, wrong, y)) == "x_test, sample 2, feature (0, 1, 0) is nan, and 1 more"
    assert not_finite(Dataset("d", "", x, y, x, y / 0)) == "y_test, sample 0 is nan, and 3 more"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_an_infinite_number_is_found_in_every_format(dtype):
    x = X.to(dtype)
    assert not_finite(Dataset("d", "", x, Y, x, Y)) == ""
    wrong = x.clone()
    wrong[5, 2] = math.inf
    assert not_finite(Dataset("d", "", wrong, Y, x, Y)) == "x_train, sample 5, feature 2 is inf"
