"""Right steps of less usual loops: none has a defect, and each is called and counted as without the watch."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpcompare


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(8, 4)).square().mean()


def defects(seen) -> list[str]:
    return [f"{defect.cause}: {defect.sentence}" for defect in seen.defects]


@pytest.mark.parametrize("by_name", [False, True])
def test_the_arguments_of_a_scaler_may_have_names(by_name):
    model = nn.Linear(4, 3)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with mpcompare.watch(model, optimizer) as seen:
        for number in range(3):
            loss = loss_of(model)
            (scaler.scale(outputs=loss) if by_name else scaler.scale(loss)).backward()
            if number == 1:
                model.weight.grad[0] = math.inf
            scaler.step(**{"optimizer": optimizer}) if by_name else scaler.step(optimizer)
            new = 512.0 if number == 0 else None
            scaler.update(new_scale=new) if by_name else scaler.update(new)
            optimizer.zero_grad()
    assert not defects(seen)
    assert (seen.facts["skipped"], seen.facts["scales"]) == (1, [1024.0, 512.0, 256.0])


class GivenTheLoss(torch.optim.SGD):
    """The argument of ``step`` is no closure, as in Polyak's step size."""

    def step(self, loss=None):
        assert isinstance(loss, float)
        return super().step()


class GivenByName(torch.optim.SGD):
    def step(self, *, closure=None):
        return super().step(closure)


def test_a_step_gets_the_argument_that_the_loop_gives_it():
    model = nn.Linear(4, 3)
    optimizer = GivenTheLoss(model.parameters(), lr=0.01)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        loss = loss_of(model)
        loss.backward()
        optimizer.step(loss.item())
    assert not defects(seen)
    optimizer = GivenByName(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with mpcompare.watch(model, optimizer, steps=1) as seen:
        optimizer.step(closure=closure)
    assert not defects(seen)
    assert seen.facts["updates"] == 1


def test_a_hook_after_the_step_moves_the_weights_between_updates():
    model = nn.Linear(4, 3)
    optimizer = sgd(model)

    @torch.no_grad()
    def clamp(*_):
        model.weight.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert not defects(seen)
    assert seen.facts["moved_between_updates"] == ["weight"]


def test_a_clip_of_another_network_is_none_of_this_one():
    made, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer, other = sgd(made), sgd(judge)
    with mpcompare.watch(made, optimizer, steps=1) as seen:
        z = torch.randn(8, 4)
        judge(made(z).detach()).mean().backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        other.step()
        judge(made(z)).mean().backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1e-3)
        optimizer.step()
    assert not defects(seen)
    assert seen.facts["clip_norm"] == 1e-3


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda g: g.clamp_(-1.0, 1.0), None),
        (lambda g: g.sign_(), None),
        (lambda g: g.copy_(g.bfloat16()), "gradient format"),
    ],
)
def test_clamped_gradients_have_few_digits_and_were_not_rounded(change, cause):
    model = nn.Linear(8, 4)
    optimizer = sgd(model)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        F.mse_loss(model(torch.randn(32, 8)), 9 + torch.arange(4.0) + torch.randn(32, 4)).backward()
        for p in model.parameters():
            change(p.grad)
        optimizer.step()
    assert [defect.cause for defect in seen.defects] == [cause] * (cause is not None)


@pytest.mark.parametrize("leaks", [False, True])
def test_gradients_wait_for_an_optimizer_that_steps_at_every_second_backward(leaks):
    """They are one loss's: what another loss has left in the gradients of a discriminator is a defect."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    slow, fast = sgd(model[0]), sgd(model[1])
    with mpcompare.watch(model, [slow, fast], steps=4) as seen:
        for number in range(4):
            fast.zero_grad()
            if leaks and number % 2:
                (loss_of(model) * 2).backward()
            else:
                loss_of(model).backward()
            if number % 2:
                slow.step()
                slow.zero_grad()
            fast.step()
    assert ["accumulation" in each for each in defects(seen)] == [True] * leaks


@pytest.mark.parametrize("clear", [lambda g: g.data.fill_(0), lambda g: g.data.mul_(0)])
def test_gradients_may_be_cleared_through_data(clear):
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            for p in model.parameters():
                if p.grad is not None:
                    clear(p.grad)
            loss_of(model).backward()
            optimizer.step()
    assert not defects(seen)


def test_a_loss_of_some_tensors_leaves_others_without_a_gradient():
    model = nn.ModuleDict({"made": nn.Linear(4, 4), "judge": nn.Linear(4, 1)})
    optimizers = [sgd(part) for part in model.values()]
    with mpcompare.watch(model, optimizers, steps=1) as seen:
        z = torch.randn(8, 4)
        model["judge"](model["made"](z)).mean().backward(inputs=list(model["made"].parameters()))
        optimizers[0].step()
    assert not defects(seen)


def test_a_network_in_evaluation_mode_may_train_in_turns_with_another():
    networks = [nn.Linear(4, 3), nn.Linear(4, 3).eval()]
    optimizers = [sgd(network) for network in networks]
    with mpcompare.watch(networks, optimizers, steps=2) as seen:
        for _ in range(2):
            for network, optimizer in zip(networks, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(network).backward()
                optimizer.step()
    assert not defects(seen)


@pytest.mark.parametrize(("trains", "causes"), [(False, []), (True, ["normalization"])])
def test_statistics_in_16_bits_matter_where_they_move(trains, causes):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).bfloat16().train(trains), nn.Linear(4, 3))
    model[1].requires_grad_(False)

    class Widened(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = model

        def forward(self, x):
            return model[2](model[1](model[0](x).bfloat16()).float())

    network = Widened()
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.01)
    with mpcompare.watch(network, optimizer, steps=1) as seen:
        loss_of(network).backward()
        optimizer.step()
    assert [defect.cause for defect in seen.defects] == causes


@pytest.mark.parametrize("gives", ["a product", "a gradient", "nothing"])
def test_a_gradient_that_a_scaled_loss_left_carries_its_scale(gives):
    """A loss of all samples takes the outputs of all; each part of them is then computed once more (GradCache: Gao et
    al., RepL4NLP 2021). If nothing carries the scale, the gradients are too small by it."""
    model = nn.Linear(4, 3)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        x = torch.randn(8, 4)
        known = model(x).detach().requires_grad_()
        scaler.scale(known.square().mean()).backward()
        if gives == "a product":
            (model(x) * known.grad).sum().backward()
        elif gives == "a gradient":
            model(x).backward(known.grad)
        else:
            model(x).square().mean().backward()
        scaler.step(optimizer)
        scaler.update()
    assert [defect.cause for defect in seen.defects] == ["gradient scaled"] * (gives == "nothing")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_network_may_multiply_by_a_sparse_buffer(layout):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("edges", (torch.rand(8, 8) > 0.6).float().to_sparse(layout=layout))

        def forward(self, x):
            return torch.sparse.mm(self.edges, self.layer(x))

    model = Graph()
    optimizer = sgd(model)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        for _ in range(2):
            loss_of(model).backward()
        optimizer.step()
    assert not defects(seen)
    assert not seen.not_examined


class OwnAdam(torch.optim.Optimizer):
    """Adam without the correction of its bias."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p] or {"step": torch.tensor(0.0), "exp_avg": p * 0, "exp_avg_sq": p * 0}
            self.state[p] = state
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 0.1)
            state["exp_avg_sq"].lerp_(p.grad.square(), 0.001)
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-0.01)


def test_a_wrong_update_in_fp32_is_named_as_in_16_bits():
    model = nn.Linear(4, 3)
    optimizer = OwnAdam(model.parameters())
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert {defect.cause for defect in seen.defects} == {"bias correction"}


def sums_in_place(totals, params):
    for total, p in zip(totals, params, strict=True):
        total += p.grad


def sums_at_once(totals, params):
    torch._foreach_add_(totals, [p.grad for p in params])


def keeps_the_gradients(totals, params):
    totals.append([p.grad for p in params])


def nothing(totals, params):
    pass


LEFT_OVER = {}


def leaves_one_over(totals, params):
    for p in params:
        LEFT_OVER["grad"] = p.grad  # as the variable of a loop that checks gradients


@pytest.mark.parametrize("takes", [sums_in_place, sums_at_once, keeps_the_gradients, leaves_one_over, nothing])
def test_a_loop_may_sum_gradients_that_it_clears(takes):
    """A loop that clears gradients and has not taken them loses them."""
    model = nn.Linear(4, 3)
    optimizer, params = sgd(model), list(model.parameters())
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            totals = [torch.zeros_like(p) for p in params]
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model).backward()
                takes(totals, params)
            if not (loses := takes in (leaves_one_over, nothing)):
                kept = totals[len(params) :]
                for number, p in enumerate(params):
                    p.grad = sum((each[number] for each in kept), totals[number])
            optimizer.step()
    assert {defect.cause for defect in seen.defects} == ({"accumulation"} if loses else set())


@pytest.mark.parametrize(
    ("change", "causes"),
    [
        (lambda g: g.sign(), set()),
        (lambda g: g / g.norm(), set()),
        (lambda g: g / 1024 + 1e-3 * torch.randn_like(g), set()),
        (lambda g: g + torch.randn_like(g), {"gradient scaled"}),
        (lambda g: g - g.mean(), {"gradient scaled"}),
        (lambda g: g * 0.5 ** g.dim(), {"gradient scaled"}),
    ],
)
def test_changed_gradients_that_nobody_divides_are_named_if_they_have_a_scale(change, causes):
    model = nn.Linear(4, 3)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model)
            scaler.scale(loss).backward()
            for p in model.parameters():
                p.grad.copy_(change(p.grad))
            optimizer.step()
            optimizer.zero_grad()
    assert {defect.cause for defect in seen.defects} == causes


def test_gradients_of_0_are_not_those_of_the_step_before():
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
    assert not defects(seen)


@pytest.mark.parametrize(("modes", "causes"), [("TETE", set()), ("TTEE", {"state"})])
def test_a_network_that_stays_in_evaluation_mode_is_named(modes, causes):
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    optimizer = sgd(model)
    with mpcompare.watch(model, optimizer, steps=len(modes)) as seen:
        for mode in modes:
            model.train(mode == "T")
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {defect.cause for defect in seen.defects} == causes


def test_a_backbone_may_train_in_evaluation_mode_after_a_head_in_the_other():
    head, backbone = nn.Linear(4, 3), nn.Linear(4, 3).eval()
    optimizers = [sgd(head), sgd(backbone)]
    with mpcompare.watch([head, backbone], optimizers, steps=1) as seen:
        for network, optimizer in zip((head, backbone), optimizers, strict=True):
            loss_of(network).backward()
            optimizer.step()
    assert not defects(seen)


@pytest.mark.parametrize(("scale", "causes"), [(None, {"underflow"}), (2.0**20, set())])
def test_gradients_that_fp16_cannot_hold_are_named_where_nobody_scales_the_loss(scale, causes):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with mpcompare.watch(model, optimizer, steps=2) as seen:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(torch.randn(16, 8)).float(), torch.randint(5, (16,))) * 3e-6
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert {defect.cause for defect in seen.defects} == causes
    assert all("% off: its numbers are below 6.1e-05" in defect.sentence for defect in seen.defects)


def test_a_gradient_that_is_0_but_for_roundings_is_no_underflow():
    model = nn.Linear(8, 4)
    optimizer = sgd(model)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(16, 8))
        out.float().softmax(-1).sum(-1).mean().backward()  # it is 1, whatever the output is
        optimizer.step()
    assert not defects(seen)
