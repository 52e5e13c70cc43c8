"""The threshold of a step is the largest power of two at which its gradients are finite."""

import pytest
import record_thresholds
import torch
from record_thresholds import backward, find
from torch import nn

from mpcompare.scalers.overflows import of_thresholds

SMALL = ("data=digits", "task.batch_size=8", "task.model.hidden=[8]", "task.samples=16")


@pytest.fixture
def step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(3, 4)).float().square().mean()
    return model, loss


@pytest.mark.parametrize("start", [2.0**-10, 2.0**16, 2.0**40])
def test_the_search_ends_at_the_threshold_wherever_it_begins(step, start):
    model, loss = step
    threshold = find(model, loss, start)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert not backward(model, loss, threshold * 2)
    assert backward(model, loss, threshold)
    assert threshold == find(model, loss, 2.0**16)


@pytest.mark.slow
def test_gradients_that_are_never_finite_end_the_program_with_one_line(step, capsys):
    model, loss = step
    with pytest.raises(SystemExit):
        find(model, loss * torch.nan, 2.0**16)
    assert "no loss scale makes the gradients finite, the loss is nan" in capsys.readouterr().err


def test_the_output_can_be_read_as_thresholds(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["record_thresholds.py", "mnist_mlp", *SMALL, "--steps", "3"])
    record_thresholds.main()
    file = tmp_path / "thresholds.txt"
    file.write_text(capsys.readouterr().out)
    assert len(of_thresholds(file)) == 3


def test_a_threshold_below_one_is_printed_and_a_frozen_weight_has_no_gradient(monkeypatch, capsys):
    def find(model, loss, scale):
        (loss * 0.5).backward()
        next(model.parameters()).grad = None
        return 0.5

    monkeypatch.setattr(record_thresholds, "find", find)
    monkeypatch.setattr("sys.argv", ["record_thresholds.py", "mnist_mlp", *SMALL, "--steps", "2"])
    record_thresholds.main()
    assert capsys.readouterr().out.splitlines()[1:] == ["0.5", "0.5"]
