"""Seeds of torch's generators."""

import pytest
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


@pytest.mark.parametrize("used", [False, True])
def test_a_seed_is_taken_back_on_all_gpus(used, monkeypatch):
    said = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *state: said.append(state))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", said.append)
    torch.default_generator.manual_seed(5)
    before = torch.get_rng_state()
    with generators.torchs_kept():
        torch.default_generator.manual_seed(7)
    assert said == ([("state of 0", 0), ("state of 1", 1)] if used else [5])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_draws_on_after_a_seed():
    torch.manual_seed(5)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(5)
    with generators.torchs_kept():
        generators.seed(7)
    assert torch.equal(torch.rand(4, device="cuda"), expected)
