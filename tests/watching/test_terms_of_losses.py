"""Terms of a loss that a scaler multiplies never, once or twice; and loops of the same form that are right."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcompare

SCALE = 1024.0


class Training:
    """Updates of a small network, with a loss and a further term."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def losses(self) -> tuple[Tensor, Tensor]:
        out = self.model(self.x)
        return F.cross_entropy(out, torch.randint(5, (16,))), out.square().mean()

    def seen(self, backward):
        with mpcompare.watch(self.model, self.optimizer, steps=1) as seen:
            self.x = torch.randn(16, 8, requires_grad=True)
            backward(self, self.scaler.scale)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return seen


def all_of_it(t, scale):
    loss, term = t.losses()
    scale(loss + 0.1 * term).backward()


def each_apart(t, scale):
    loss, term = t.losses()
    (scale(loss) + scale(term) / 3).backward()


def by_hand(t, scale):
    loss, term = t.losses()
    (scale(loss) + 0.1 * SCALE * term).backward()


def all_parameters(t, scale):
    """A loop may let a term of 0 depend on all parameters, for DistributedDataParallel."""
    (scale(t.losses()[0]) + 0.0 * sum(p.sum() for p in t.model.parameters())).backward()


def two_passes(t, scale):
    loss, term = t.losses()
    scale(loss).backward(retain_graph=True)
    scale(term).backward()


def of_cached(t, scale):
    """The second loss goes on from a gradient that is scaled."""
    scale(t.losses()[0]).backward()
    known = t.model(t.x).detach().requires_grad_()
    (grad,) = torch.autograd.grad(scale(known.square().mean()), known)
    (t.model(t.x) * grad).sum().backward()


def penalty(divide, size=torch.Tensor.norm):
    def backward(t, scale):
        loss = t.losses()[0]
        (grad,) = torch.autograd.grad(scale(loss), t.x, create_graph=True)
        scale(loss + 0.1 * size(divide(grad))).backward()

    return backward


def size_of(t):
    return 1e-4 * sum(p.square().sum() for p in t.model.parameters())


class TimesScale(torch.autograd.Function):
    """Multiplies a gradient by the loss scale, as the auxiliary losses of Megatron do."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return SCALE * grad


def own_function(t, scale):
    (scale(t.losses()[0]) + TimesScale.apply(size_of(t))).backward()


def with_logged(t, scale):
    loss, term = t.losses()
    torch.stack([scale(loss + term), loss, size_of(t)])[0].backward()


def overwritten(t, scale):
    kept, size = torch.zeros(1), size_of(t)
    kept[0] = size
    kept[0] = scale(t.losses()[0] + size)
    kept.sum().backward()


def whole_number(t, scale):
    torch.add(scale(t.losses()[0]), size_of(t), alpha=int(SCALE)).backward()


def without_gradient(term):
    return lambda t, scale: (scale(t.losses()[0]) + term(size_of(t))).backward()


def given_to_a_layer(t, scale):
    t.model[2](scale(t.losses()[0]).expand(1, 16)).sum().backward()


@pytest.mark.parametrize(
    "backward",
    [
        own_function, with_logged, overwritten, whole_number, given_to_a_layer,
        without_gradient(lambda size: (torch.stack([size, size]) * torch.zeros(2)).sum()),
        without_gradient(lambda size: torch.where(torch.tensor(False), size, 0.0)),
        without_gradient(lambda size: F.relu(size - 100.0)), without_gradient(lambda size: size - 0.5 * (size + size)),
        all_of_it, each_apart, by_hand, all_parameters, two_passes, of_cached, penalty(lambda grad: grad / SCALE),
        penalty(lambda grad: grad * (1.0 / SCALE)), penalty(lambda grad: grad / grad.norm().detach()),
    ],
)  # fmt: skip
def test_each_term_is_scaled_once(backward):
    seen = Training().seen(backward)
    assert seen.defects == []
    assert seen.facts["scales"] == [SCALE]


def one_of_two(t, scale):
    loss, term = t.losses()
    (scale(loss) + 0.1 * term).backward()


def one_of_two_passes(t, scale):
    loss, term = t.losses()
    scale(loss).backward(retain_graph=True)
    term.backward()


def decay(t, scale):
    (scale(t.losses()[0]) + 1e-4 * sum(p.square().sum() for p in t.model.parameters())).backward()


def squared(term):
    return term * term


def twice(t, scale):
    scale(scale(t.losses()[0]) / 2).backward()


NEVER = "is not multiplied by the loss scale: it counts 1/1024 of what was meant"
TWICE = "is multiplied by the loss scale twice: it counts 1024 times what was meant"
THRICE = "is multiplied by the loss scale 3 times: it counts 1048576 times what was meant"
FIVE_TIMES = "is multiplied by the loss scale 5 times: it counts 1099511627776 times what was meant"


@pytest.mark.parametrize(
    ("backward", "said"),
    [
        (one_of_two, NEVER), (one_of_two_passes, NEVER), (decay, NEVER), (twice, TWICE),
        (penalty(lambda grad: grad), TWICE), (penalty(lambda grad: grad, lambda g: g.square().sum()), THRICE),
        (penalty(lambda grad: grad, lambda g: squared(squared(sum(row.abs().sum() for row in g)))), FIVE_TIMES),
    ],
)  # fmt: skip
def test_a_term_that_is_not_scaled_or_more_than_once(backward, said):
    (defect,) = Training().seen(backward).defects
    assert str(defect).startswith("loss scale: a term of the loss of update 1 (test_terms_of_losses.py:")
    assert defect.sentence.endswith(said)


def test_a_later_update_may_have_another_loss():
    t = Training()
    with mpcompare.watch(t.model, t.optimizer, steps=2) as seen:
        for backward in (all_of_it, one_of_two):
            t.x = torch.randn(16, 8, requires_grad=True)
            backward(t, t.scaler.scale)
            t.scaler.step(t.optimizer)
            t.scaler.update()
            t.optimizer.zero_grad()
    (defect,) = seen.defects
    assert str(defect).startswith("loss scale: a term of the loss of update 2")
