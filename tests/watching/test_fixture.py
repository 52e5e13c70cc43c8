"""The fixture ``watched``, in a test run of its own."""

import subprocess
import sys

import pytest

TEST = """
import torch
from torch import nn


def train(watched, expect):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, expect=expect, steps=1):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()


def test_right(watched):
    train(watched, {"precision": "fp32", "clip_norm": None})


def test_wrong(watched):
    train(watched, {"precision": "bf16"})


def test_without_with(watched):
    model = nn.Linear(4, 2)
    watched(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.mark.slow
def test_the_fixture(tmp_path):
    (tmp_path / "test_it.py").write_text(TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "mpcompare.watching.fixture",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "1 failed, 2 passed, 1 error" in found.stdout
    assert "put `with` before it" in found.stdout
    assert "watched.py" not in found.stdout  # none of our own lines
    assert "precision is fp32, expected bf16" in found.stdout
