"""The comparing of a watched loop is shown in a terminal, and nowhere else."""

import io

import pytest
import torch
from torch import nn

import mpcompare


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stderr", [Terminal, io.StringIO])
def test_comparing_is_shown_in_a_terminal_alone(monkeypatch, stderr):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # these variables stand for a terminal
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", shown := stderr())
        with mpcompare.watch(model, optimizer, steps=2) as seen:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    assert seen.verdict == "no defect"
    assert ("comparing update 2 of 2" in shown.getvalue()) is (stderr is Terminal)
    assert bool(shown.getvalue()) is (stderr is Terminal)
