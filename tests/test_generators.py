"""Seeds of torch's generators."""

import torch

from mpcompare import generators


def test_a_seed_is_the_one_of_torch():
    generators.seed(7)
    ours = torch.rand(4)
    torch.manual_seed(7)
    assert torch.equal(ours, torch.rand(4))


def test_the_generators_of_a_gpu_are_set_too(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    generators.seed(7)
    assert seeds == [7]
