"""Functions that nodes of a configuration name."""

from mpcompare.errors import InputError


def loss(output, targets, weight=1.0):
    return weight * (output - targets).square().mean()


def refuses(value):
    raise InputError("task.loss", value, "expected less")


def fails():
    raise ZeroDivisionError("a bug")


def named(**values):
    return values
