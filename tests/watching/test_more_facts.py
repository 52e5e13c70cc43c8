"""Facts of a network and its optimizer that an expectation refuses, and why nothing was seen."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpcompare
from mpcompare.watching.watched import WrongTraining


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)))


def train(model, optimizer, updates=2):
    for _ in range(updates):
        x = torch.randint(8, (16,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), x).backward()
        optimizer.step()


def refused(model, optimizer, expect, updates=2) -> str:
    """Trains, and returns what an expectation says. The text is empty where the expectation is met."""
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        train(model, optimizer, updates)
    assert seen.defects == []
    try:
        seen.raise_if_wrong(expect=expect)
    except WrongTraining as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_no_longer_tied(tied):
    model = Tied(tied)
    said = refused(model, torch.optim.SGD(model.parameters(), lr=0.1), {"tied": [["embedding.weight", "head.weight"]]})
    assert bool(said) != tied
    assert tied or "tied is none, expected [embedding.weight, head.weight]" in said


@pytest.mark.parametrize("training", [True, False])
def test_a_frozen_norm_whose_statistics_move(training):
    model = Tied()
    model.norm.requires_grad_(False)
    model.norm.train(training)
    optimizer = torch.optim.SGD(model.embedding.parameters(), lr=0.1)
    assert ("statistics_of_frozen is norm" in refused(model, optimizer, {"statistics_of_frozen": []})) == training


def test_a_network_that_is_a_norm_and_is_trained():
    model = nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        model(torch.randn(8, 4)).pow(3).mean().backward()
        optimizer.step()
    assert seen.facts["statistics_of_frozen"] == []


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [True, False])
def test_a_run_that_goes_on_without_the_moments_of_the_one_before(loaded):
    model = Tied()
    before = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, before, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if loaded:
        optimizer.load_state_dict(before.state_dict())
    assert bool(refused(model, optimizer, {"updates_before": 3})) != loaded


@pytest.mark.slow
@pytest.mark.parametrize("detached", [True, False])
def test_a_term_of_the_loss_that_passes_no_gradient(detached):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        total, z = torch.zeros(()), model(torch.randn(8, 4))
        total = total + F.cross_entropy(z, torch.randint(3, (8,))) + 1e-8
        total = total + (z.detach() if detached else z).square().mean()
        total.backward()
        optimizer.step()
    assert (len(seen.facts["terms_without_gradient"]), seen.defects) == (detached, [])


def test_the_sum_in_the_denominator_of_a_dice_loss_is_no_term():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        shares, target = model(torch.randn(8, 4)).softmax(-1), F.one_hot(torch.randint(3, (8,)), 3)
        loss = (1 - 2 * (shares * target).sum() / (shares.sum() + target.sum())) / 2
        loss.backward()
        optimizer.step()
    assert seen.facts["terms_without_gradient"] == []


def test_a_loop_that_steps_with_another_optimizer():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = "SGD, which has 3 parameters of the network"
    assert f"no optimizer that is watched took a step, and others did: {other}" in str(seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_network", "has"), [(True, "3 parameters of the network"), (False, "no parameter of the network")]
)
def test_an_optimizer_that_the_loop_makes(of_network, has):
    model, other = Tied(), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mpcompare.watch(model, optimizer) as seen:
        train(model, optimizer)
        second = torch.optim.SGD((model if of_network else other).parameters(), lr=0.1)
        train(model, optimizer)
        other(torch.ones(4)).sum().backward()
        second.step()
    assert seen.facts["other_optimizers"] == [f"SGD, which has {has}"]
    assert seen.not_examined == [f"updates of SGD, which has {has}: the watch was not given it"]
    assert seen.defects == []


def test_gradients_that_the_loss_of_another_optimizer_makes_are_no_loss_of_work():
    model, other = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    with mpcompare.watch(model, optimizers[0]) as seen:
        for _ in range(3):
            for optimizer in reversed(optimizers):  # nobody detaches the output for the other network
                optimizer.zero_grad()
                other(model(torch.randn(8, 4))).square().mean().backward()
                optimizer.step()
    assert (seen.defects, seen.facts["updates"]) == ([], 3)


def test_a_clip_for_another_optimizer_is_not_late():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            other.step()
    assert seen.defects == []


def test_two_watches_know_the_optimizers_of_each_other():
    models = Tied(), Tied()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with mpcompare.watch(models[0], optimizers[0]) as one, mpcompare.watch(models[1], optimizers[1]) as other:
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer)
    assert [seen.facts["other_optimizers"] for seen in (one, other)] == [[], []]


def test_a_loop_whose_scaler_skips_all():
    model = Tied()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(2):
            x = torch.randint(8, (16,))
            scaler.scale(F.cross_entropy(model(x), x) * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
    with pytest.raises(WrongTraining, match="nothing was seen: the scaler skipped all 2 steps"):
        seen.raise_if_wrong()


def test_the_weights_of_losses_that_were_not_replayed():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        loss = F.cross_entropy(model(torch.arange(8)), torch.arange(8))
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g
        optimizer.step()
    with pytest.raises(WrongTraining, match="weights is not known: no loss function of torch was replayed, expected 1"):
        seen.raise_if_wrong(expect={"micro_batch_weights": [1.0]})


def test_the_settings_of_a_group_in_each_update():
    """A schedule of one cycle moves betas, too, and adds notes of its own to the group."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()
    (group,) = seen.facts["groups"]
    assert [first for first, _ in group["betas"]] == pytest.approx([0.95, 0.9])
    assert list(group) == ["parameters", "lr", "weight_decay", "betas", "eps", "amsgrad"]


def test_a_block_that_is_still_open_says_so():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert str(seen) == "nothing was seen: the block is still open, and what it sees is compared when it ends"
    assert seen.verdict == "no defect"


def test_a_loss_that_is_no_loss_function_of_torch_is_said_not_to_be_known():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        (-model(torch.randn(8, 4)).log_softmax(-1)[:, 0].mean()).backward()
        optimizer.step()
    assert str(seen.facts["loss"]).startswith("not known: the loop calls no loss function of torch")
    with pytest.raises(WrongTraining, match="weights is not known: no loss function of torch was replayed"):
        seen.raise_if_wrong(expect={"micro_batch_weights": 1.0})


@pytest.mark.parametrize("by_scaler", [True, False])
def test_a_step_past_the_scaler_is_a_fact(by_scaler):
    model = nn.Linear(4, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        scaler.scale(F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,)))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer) if by_scaler else optimizer.step()
        scaler.update()
    assert seen.defects == []
    past = "" if by_scaler else ", and the loop itself takes the steps: the scaler skips none"
    assert seen.facts["loss_scale"] == f"times 2 every 2000, times 0.5 back{past}"
