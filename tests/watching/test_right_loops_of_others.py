"""Right loops in ways that people train: none has a defect, each trains as without the watch, and the watch says what
it does not see."""

import contextlib
import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from support.marks import slow_after
from torch import nn
from torch.nn import functional as F

import mpcompare

UPDATES = 3


def plain(inputs: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))


class Trained:
    """A loop of three updates in bf16. Its parts are methods."""

    not_examined: tuple[str, ...] = ()

    def make(self) -> nn.Module:
        return plain()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
        return F.cross_entropy(model(x).float(), y)

    def backward(self, loss: torch.Tensor, model: nn.Module) -> None:
        loss.backward()

    def before_step(self, model: nn.Module) -> None:
        pass

    def between(self, model: nn.Module, number: int) -> None:
        pass

    def run(self, watch):
        torch.manual_seed(0)
        model = self.make()
        optimizer = self.optimizer(model)
        with watch(model, optimizer) as seen:
            for number in range(UPDATES):
                x, y = torch.randn(16, 8), torch.randint(5, (16,))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = self.loss(model, x, y, number)
                optimizer.zero_grad()
                self.backward(loss, model)
                self.before_step(model)
                optimizer.step()
                self.between(model, number)
        return seen, list(model.state_dict().values())


class Annealed(Trained):
    """The network is given another temperature after each update, and another rate of dropout."""

    def make(self):
        class Cooled(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.drop, self.temperature, self.calls = plain(), nn.Dropout(0.1), 4.0, 0
                self.noise, self.memory = np.random.default_rng(0), None

            def forward(self, x):
                self.calls += 1
                h = self.drop(self.body(x)) / self.temperature / self.calls + float(self.noise.normal())
                h, self.memory = h if self.memory is None else h + self.memory, h.detach()
                return h

        return Cooled()

    def between(self, model, number):
        model.temperature, model.drop.p = 0.5 * model.temperature, 0.2 * (1 + number)


class Unfrozen(Trained):
    """The first layer is frozen until the last update."""

    def make(self):
        model = plain()
        model[0].requires_grad_(False)
        return model

    def between(self, model, number):
        model[0].requires_grad_(number == 1)


class Penalized(nn.Module):
    """A network that keeps terms of its loss, one of them in 16 bits, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x):
        h = self.body(x)
        self.penalty = h.float().square().mean()
        self.terms = {"size": [h.abs() * 0.5]}
        OUTSIDE[:] = [h * h]
        return self.last(h.relu())


OUTSIDE: list[torch.Tensor] = []


class AuxiliaryLoss(Trained):
    """Terms of the loss are in attributes that the network sets."""

    def make(self):
        return Penalized()

    def loss(self, model, x, y, number):
        return super().loss(model, x, y, number) + 0.1 * model.penalty + model.terms["size"][0].float().mean()


class KeptOutside(Trained):
    """A term of the loss is in a list that is no attribute."""

    not_examined = ("within the network, which it does not return",)

    def make(self):
        return Penalized()

    def loss(self, model, x, y, number):
        return super().loss(model, x, y, number) + 0.1 * OUTSIDE[0].float().mean()


class Features(Trained):
    """Hooks collect what two layers and a block return, and the loss has terms of it."""

    def make(self):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Sequential(plain(16), nn.Tanh()))
        self.named, self.every, self.count = {}, [], 0
        for name, module in {"wide": model[1], "first": model[2][0], "block": model[2]}.items():
            module.register_forward_hook(partial(self.collect, name))
        return model

    def collect(self, name, module, given, output):
        self.named[name], self.count = output, self.count + 1
        self.every.append(output)

    def loss(self, model, x, y, number):
        loss = super().loss(model, x, y, number) + sum(t.float().square().mean() for t in self.named.values())
        loss = loss + 0.1 * sum(t.float().abs().mean() for t in self.every)
        self.every.clear()
        return loss


class ClippedByHooks(Trained):
    not_examined = ("which hooks of the loop may change",)

    def make(self):
        model = plain()
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return model


class HookOnAnOutput(Trained):
    """Half of the gradient goes back from a layer's output (Schrittwieser et al., arXiv 1911.08265, appendix G)."""

    def make(self):
        class Halved(nn.Sequential):
            def forward(self, x):
                h = self[0](x)
                if h.requires_grad:
                    h.register_hook(lambda g: 0.5 * g)
                return self[1](h.tanh())

        return Halved(nn.Linear(8, 16), nn.Linear(16, 5))


class LastLayerCleared(Trained):
    """The gradients of the last layer are dropped, as DINO and SwAV do at first."""

    def before_step(self, model):
        for p in model[-1].parameters():
            p.grad = None


class DecayedByHand(Trained):
    def before_step(self, model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - 1e-3)


class SetByHand(Trained):
    """Gradients come from ``torch.autograd.grad``."""

    not_examined = ("no backward made",)

    def backward(self, loss, model):
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g


class LoggedBefore(Trained):
    """The norm of the gradient of another batch is looked at before each update."""

    def backward(self, loss, model):
        F.cross_entropy(model(torch.ones(4, 8)), torch.arange(4)).backward()
        float(sum(p.grad.square().sum() for p in model.parameters()))
        model.zero_grad()
        loss.backward()


class NearACopy(Trained):
    """The loss is the distance from a copy of the network: nearly all of it cancels."""

    def loss(self, model, x, y, number):
        if not number:
            self.teacher = copy.deepcopy(model).eval()
        with torch.no_grad():
            old = self.teacher(x).float()
        return 16 * F.kl_div(F.log_softmax(model(x).float() / 4, -1), F.softmax(old / 4, -1), reduction="batchmean")


class CompiledLoss(Trained):
    not_examined = ("of which no function of torch was seen",)

    def loss(self, model, x, y, number):
        if not number:
            self.focal = torch.compile(focal, backend="aot_eager", fullgraph=True)
        return self.focal(model(x), y)


def focal(z, y):
    loss = F.cross_entropy(z.float(), y, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


class FastTeacher(Trained):
    """A teacher in evaluation takes torch's fast path, which computes other bits."""

    def make(self):
        self.teacher = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
        return plain()

    def loss(self, model, x, y, number):
        with torch.no_grad():
            old = self.teacher(x[None])[0].float()
        return super().loss(model, x + old, y, number)


class FastCopy(Trained):
    """The loop makes its teacher of the network when it is watched already."""

    def make(self):
        self.teacher = None
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Linear(8, 64), nn.Unflatten(1, (4, 16)), layer, nn.Flatten(), nn.Linear(64, 5))

    def loss(self, model, x, y, number):
        self.teacher = self.teacher or copy.deepcopy(model).eval()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            old = self.teacher(x)
        return super().loss(model, x, y, number) + (model(x).float() - old).square().mean()


class Discriminated(Trained):
    """The gradients of a discriminator are turned off and on, and it is trained in between."""

    def loss(self, model, x, y, number):
        if not number:
            self.other = nn.Linear(5, 2)
        self.other.requires_grad_(False)
        loss = self.other(model(x)).float().square().mean()
        self.other.requires_grad_(True)
        return loss

    def between(self, model, number):
        with torch.no_grad():
            for p in self.other.parameters():
                p.add_(0.5)


class PseudoLabels(Trained):
    """The network is called once more in each update, in training mode and without gradients, as for labels of its own
    (Sohn et al., arXiv 2001.07685) or for an accuracy. Each call moves the running statistics."""

    def make(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 5))

    def looked_at(self, model, x):
        with torch.no_grad():
            return model(x + 1).argmax(-1)

    def loss(self, model, x, y, number):
        first = super().loss(model, x, self.looked_at(model, x), number)
        self.looked_at(model, x)
        return first + super().loss(model, -x, y, number)

    def before_step(self, model):
        self.looked_at(model, torch.ones(4, 8))


class NoisyForBackward(Trained):
    """Noise is in the weights while gradients are computed (Graves, "Practical variational inference", 2011)."""

    def loss(self, model, x, y, number):
        self.kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)
        return super().loss(model, x, y, number)

    def before_step(self, model):
        with torch.no_grad():
            for p, kept in zip(model.parameters(), self.kept, strict=True):
                p.copy_(kept)


class Bounded(nn.Linear):
    """Its forward writes its weight: by ``data``, as EEGNet bounds norms, or in place, as EDM2 normalizes."""

    def __init__(self, inputs, outputs, in_place):
        super().__init__(inputs, outputs)
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
        else:
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


class WrittenInForward(Trained):
    def make(self):
        return nn.Sequential(Bounded(8, 16, False), nn.GELU(), Bounded(16, 16, True), nn.GELU(), nn.Linear(16, 5))


class Attacked(Trained):
    """The network sees inputs moved along the sign of their gradient (Goodfellow et al., arXiv 1412.6572)."""

    def loss(self, model, x, y, number):
        moved = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().loss(model, moved, y, number), moved)
        return super().loss(model, x + 0.03 * slope.sign(), y, number)


class PenaltyOfSlopes(Trained):
    def loss(self, model, x, y, number):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
        return super().loss(model, x, y, number) + slope.square().mean()


class FastWeights(Trained):
    """Weights that are one step ahead (first-order MAML, Finn et al., arXiv 1703.03400)."""

    def loss(self, model, x, y, number):
        own = dict(model.named_parameters())
        slopes = torch.autograd.grad(super().loss(model, -x, y, number), list(own.values()))
        fast = {name: p - 0.1 * g for (name, p), g in zip(own.items(), slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, fast, (x,)).float(), y)


class LossOfEach(Trained):
    not_examined = ("of which no function of torch was seen",)

    def loss(self, model, x, y, number):
        return torch.vmap(lambda z, k: z.logsumexp(0) - z.gather(0, k[None]).squeeze(0))(model(x).float(), y).mean()


class AttackedLossOfEach(LossOfEach):
    """The gradients of the attack are in no parameter's gradient, and the loss is hidden."""

    def loss(self, model, x, y, number):
        moved = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(moved).float(), y), moved)
        return super().loss(model, x + 0.03 * slope.sign(), y, number)


class SlopeOfEach(Trained):
    not_examined = ("the network is called by a function of torch.func",)

    def loss(self, model, x, y, number):
        slopes = torch.vmap(torch.func.grad(lambda v: model(v).float().square().sum()))(x)
        return super().loss(model, x, y, number) + slopes.square().mean()


class Temperature(Trained):
    """A number that is no part of the network is trained by itself, as in soft actor-critic."""

    def between(self, model, number):
        if not number:
            self.log = torch.zeros(1, requires_grad=True)
        with torch.no_grad():
            size = model(torch.ones(4, 8)).float().abs().mean()
        (self.log * size).sum().backward()


class Amplified(Trained):
    """An average of earlier gradients is added to each gradient (Lee et al., arXiv 2405.20233)."""

    def before_step(self, model):
        for p in model.parameters():
            p.average = 0.9 * getattr(p, "average", p.grad.data) + 0.1 * p.grad.data
            p.grad.data = p.grad.data + 2 * p.average


class MomentumByHand(Trained):
    """Nine tenths of the gradients stay for the next update."""

    not_examined = ("the gradients of the update before are still in them",)

    def backward(self, loss, model):
        for p in model.parameters():
            p.grad = getattr(p, "kept", None)
        loss.backward()

    def between(self, model, number):
        for p in model.parameters():
            p.kept = p.grad.mul_(0.9)


class LearnedStep(torch.autograd.Function):
    """A rounding to a grid whose step is learned (Esser et al., arXiv 1902.08153)."""

    @staticmethod
    def forward(ctx, w, step):
        ctx.save_for_backward(w, step)
        return (w / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx, gradient):
        w, step = ctx.saved_tensors
        whole = (w / step).round().clamp(-8, 7)
        return gradient, 0.1 * (gradient * (whole - w / step)).sum()


class Quantized(Trained):
    def make(self):
        class OnAGrid(nn.Linear):
            def __init__(self, inputs, outputs):
                super().__init__(inputs, outputs)
                self.step = nn.Parameter(torch.tensor(0.05))

            def forward(self, x):
                return F.linear(x, LearnedStep.apply(self.weight, self.step), self.bias)

        return nn.Sequential(OnAGrid(8, 16), nn.GELU(), OnAGrid(16, 5))


class Queue(nn.Module):
    """Keys of earlier batches, kept in bf16, are compared with this batch's keys (He et al., arXiv 1911.05722)."""

    def __init__(self):
        super().__init__()
        self.query, self.key = plain(), plain().requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(64, 5)).bfloat16())

    def forward(self, x):
        query = F.normalize(self.query(x))
        with torch.no_grad():
            key = F.normalize(self.key(x + 0.1))
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.to(query.dtype).t()], 1)
        with torch.no_grad():
            self.queue[: len(key)] = key.to(self.queue.dtype)
        return scores / 0.2


class KeysIn16Bits(Trained):
    def make(self):
        return Queue()

    def loss(self, model, x, y, number):
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(model(x), torch.zeros_like(y))


class Balanced(Trained):
    """An equilibrium, whose hook goes back through one call of the network again and again (Bai et al., arXiv
    1909.01377)."""

    not_examined = ("one backward comes to inner several times",)

    def make(self):
        class Equilibrium(nn.Module):
            def __init__(self):
                super().__init__()
                self.given, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

            def forward(self, x):
                x = self.given(x).float()
                z = torch.tanh(0.5 * self.inner(torch.tanh(x)).float() + x)
                start = z.detach().requires_grad_()
                end = torch.tanh(0.5 * self.inner(start).float() + x.detach())

                def back(g):
                    for _ in range(3):
                        g = g + torch.autograd.grad(end, start, g, retain_graph=True)[0]
                    return g

                z.register_hook(back)
                return self.last(z)

        return Equilibrium()


class Grown(Trained):
    """A layer with a group of its own comes after the first update."""

    not_examined = ("the network has got other layers or weights since", "other parameters than its own")

    def optimizer(self, model):
        self.updates = super().optimizer(model)
        return self.updates

    def between(self, model, number):
        if not number:
            model.append(nn.Linear(5, 5))
            self.updates.add_param_group({"params": model[-1].parameters()})


class LastLayerAlone(Trained):
    """The gradients of the last layer alone are asked for."""

    not_examined = ("the gradients of some tensors alone",)

    def backward(self, loss, model):
        loss.backward(inputs=list(model[-1].parameters()))


class WithoutNaN(Trained):
    """NaN in gradients would be replaced by 0, as in EDM and StyleGAN3."""

    def before_step(self, model):
        for p in model.parameters():
            torch.nan_to_num(p.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=p.grad)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer (github.com/davda54/sam)."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def climb(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["kept"] = p.clone()
            p.add_(p.grad / p.grad.norm(), alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def come_down(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = self.state[p]["kept"]
        self.base_optimizer.step()


class Sharp(Trained):
    def optimizer(self, model):
        self.sam = SAM(model.parameters())
        self.sam.step = self.sam.come_down
        return self.sam

    def loss(self, model, x, y, number):
        self.again = lambda: F.cross_entropy(model(x).float(), y)
        return self.again()

    def backward(self, loss, model):
        loss.backward()
        self.sam.climb()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.again()
        loss.backward()


QUICK = [AuxiliaryLoss, ClippedByHooks, FastCopy, KeysIn16Bits, Grown]
LOOPS = [Annealed, Features, LastLayerCleared, DecayedByHand, NearACopy, Discriminated, NoisyForBackward, LossOfEach,
         Unfrozen, KeptOutside, HookOnAnOutput, SetByHand, LoggedBefore, FastTeacher, PseudoLabels, WrittenInForward,
         Attacked, AttackedLossOfEach, Temperature, MomentumByHand, WithoutNaN, Sharp, LastLayerAlone, PenaltyOfSlopes,
         FastWeights, SlopeOfEach, Amplified, Quantized, Balanced, CompiledLoss]  # fmt: skip


@pytest.mark.parametrize("loop", slow_after(len(QUICK), [*QUICK, *LOOPS]))
def test_a_right_loop_has_no_defect_and_trains_as_without_the_watch(loop):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns
        _, alone = loop().run(lambda *_: contextlib.nullcontext())
        seen, weights = loop().run(mpcompare.watch)
    assert all(torch.equal(a, b) for a, b in zip(alone, weights, strict=True))
    assert seen.defects == [], str(seen)
    assert seen.facts["updates"] == UPDATES
    said = [each for each in seen.not_examined if not any(why in each for why in loop.not_examined)]
    assert said == []
    assert bool(loop.not_examined) == bool(seen.not_examined)


def test_what_hooks_collect_is_put_back_after_a_replay():
    loop = Features()
    seen, _ = loop.run(mpcompare.watch)
    assert (loop.count, loop.every, seen.not_examined) == (3 * UPDATES, [], [])
    assert {t.dtype for t in loop.named.values()} == {torch.bfloat16}


def test_a_wrong_gradient_of_features_is_found():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.square()

        @staticmethod
        def backward(ctx, gradient):
            return 3 * gradient

    class Misled(Features):
        def loss(self, model, x, y, number):
            return super().loss(model, x, y, number) + Wrong.apply(self.named["wide"].float()).mean()

    seen, _ = Misled().run(mpcompare.watch)
    (defect,) = seen.defects
    assert defect.sentence.startswith("the gradient that arrives at 1 in update 1 is "), str(seen)


class Trusted(torch.optim.Optimizer):
    """SGD whose rate is the norm of the weight over the norm of its gradient (LARS)."""

    def __init__(self, params, lr=1e-2, momentum=0.9, decay=None):
        super().__init__(params, {"lr": lr, "momentum": momentum, "betas": (None, 0.9)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                norm = p.norm() if p.any() else 1.0  # else biases would stay 0
                kept.mul_(group["momentum"]).add_(p.grad * (norm / (p.grad.norm() + 1e-6)))
                p.add_(kept, alpha=-group["lr"])


class SGDW(torch.optim.Optimizer):
    """SGD with a decay outside of the gradient (Loshchilov and Hutter, arXiv 1711.05101)."""

    def __init__(self, params, lr=1e-2, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(p.grad, alpha=-group["lr"])


class Compensated(torch.optim.Optimizer):
    """SGD of 16-bit weights that remembers what roundings took from them (Kahan)."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                left = self.state[p].setdefault("compensation", torch.zeros_like(p))
                left.add_(p.grad, alpha=-group["lr"])
                before = p.clone()
                p.add_(left)
                left.add_(before.sub_(p))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Compensated, torch.optim.Adafactor, Trusted, SGDW])
def test_an_optimizer_of_another_rule_is_not_held_to_that_of_sgd(kind):
    class Own(Trained):
        def make(self):
            return plain().bfloat16() if kind is Compensated else plain()

        def optimizer(self, model):
            return kind(model.parameters())

    seen, _ = Own().run(mpcompare.watch)
    assert seen.defects == [], str(seen)
    assert seen.facts["updates"] == UPDATES
