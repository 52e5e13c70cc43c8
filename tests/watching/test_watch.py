"""``mpcompare.watch``: right loops have no defect, and not a bit of them changes. Mistakes in wrong loops are named."""

import copy
import math
import pickle
import re
import weakref
from dataclasses import replace
from functools import partial
from itertools import count, cycle

import pytest
import torch
from support.marks import CUDA, slow_after
from support.watched_loops import Loop, small_network, spoil
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpcompare
from mpcompare.errors import InputError
from mpcompare.verdict.examine.forced.kernels import of_kernels
from mpcompare.verdict.examine.forced.recorder import recorded
from mpcompare.watching.watched import NOTHING, WrongTraining

FP16 = replace(Loop(), dtype=torch.float16, updates=2)
BF16 = replace(Loop(), updates=2)


def few() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 4), torch.randint(3, (8,))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))


TINY = replace(BF16, make=two_layers, batch=few, updates=1, accumulate=1, clip=None)


def causes(seen) -> list[str]:
    return [defect.cause for defect in seen.defects]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_right_loop_has_no_defect_and_its_card_is_true(device, dtype):
    seen = replace(BF16, device=device, dtype=dtype).run(mpcompare.watch)
    assert (seen.defects, seen.not_examined, seen.verdict) == ([], [], "no defect")
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    short = device == "cuda" and dtype is not torch.float32  # as autocast on a GPU does
    loss = f"cross_entropy in fp32, its log_softmax in {name}" if short else "cross_entropy in fp32"
    expected = {
        "updates": 2, "precision": name, "clip_norm": 0.1, "micro_batches": 2, "masters": "fp32",
        "micro_batch_weights": [0.5, 0.5], "optimizer": "AdamW", "loss": loss,
    }  # fmt: skip
    seen.raise_if_wrong(expect=expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.slow
def test_no_bit_changes(device, dtype):
    loop = replace(Loop(), device=device, dtype=dtype, updates=20, scale=2.0**20)  # the loop overflows at first
    loop.run()
    right = loop.weights()
    seen = loop.run(mpcompare.watch, steps=5)
    assert all(torch.equal(a, b) for a, b in zip(right, loop.weights(), strict=True))
    loop.run(mpcompare.watch, steps=1, every=6)  # looks are compared while the loop trains
    assert all(torch.equal(a, b) for a, b in zip(right, loop.weights(), strict=True))
    assert seen.defects == []
    assert seen.facts["updates"] == 5
    assert (seen.facts["skipped"] > 0) == (dtype is torch.float16)
    model = loop.made["model"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not loop.made["optimizer"]._optimizer_step_pre_hooks


def half_the_gradients(model):
    for p in model.parameters():
        p.grad.mul_(0.5)


@pytest.mark.slow
def test_a_softmax_in_16_bits_is_a_fact():
    """Autocast on a CPU computes softmax so, in timm's published loop too. A loop may mean it."""

    def in_16_bits(z, y):
        return -z.log_softmax(-1).gather(1, y[:, None]).mean()

    seen = replace(TINY, loss=in_16_bits).run(mpcompare.watch)
    assert (causes(seen), len(seen.facts["loss_in_16_bits"])) == ([], 1)
    assert seen.facts["loss_in_16_bits"][0].startswith("log_softmax in bf16 (test_watch.py:")
    with pytest.raises(WrongTraining, match="loss_in_16_bits is log_softmax"):
        seen.raise_if_wrong(expect={"loss_in_16_bits": []})
    TINY.run(mpcompare.watch).raise_if_wrong(expect={"loss_in_16_bits": []})


@pytest.mark.slow
def test_the_loss_between_output_and_backward_is_replayed():
    """A loss that is not divided leaves no trace in what arrives at the output."""
    seen = replace(BF16, loss=lambda z, y: 2 * F.cross_entropy(z, y)).run(mpcompare.watch)
    assert seen.defects == []
    assert seen.facts["micro_batch_weights"] == [1.0, 1.0]
    with pytest.raises(WrongTraining, match=r"weights is 1, 1, expected 0.5, 0.5"):
        seen.raise_if_wrong(expect={"micro_batch_weights": [0.5, 0.5]})


def a_gradient_of_90_percent():
    model = two_layers()
    spoil(model[1].weight, lambda g: g * 0.9)
    return model


@pytest.mark.parametrize("more", slow_after(1, [0.0, math.inf]))
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_wrong_gradient_is_named_by_its_layer(device, more):
    loop = replace(TINY, device=device, loss=lambda y, target: F.cross_entropy(y, target) + more)
    assert loop.run(mpcompare.watch).defects == []
    seen = replace(loop, make=a_gradient_of_90_percent).run(mpcompare.watch)
    assert seen.defects[0].place == "1.weight"
    assert seen.verdict == "defects"


def test_a_loop_that_ends_in_evaluation_mode():
    """Dropout is replayed in the mode of its call."""

    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))

    seen = replace(TINY, make=make, after_step=lambda model: model.eval()).run(mpcompare.watch)
    assert (causes(seen), seen.not_examined) == ([], [])


def test_evaluation_in_inference_mode_is_no_part_of_a_step():
    def evaluate(model):
        with torch.inference_mode():
            x, _ = few()
            model(x)
        with torch.no_grad():
            model(x)  # a tensor of inference mode, used outside of the mode

    seen = replace(TINY, after_step=evaluate).run(mpcompare.watch)
    assert (causes(seen), seen.not_examined) == ([], [])


def test_a_dropout_is_a_layer_though_an_evaluation_with_gradients_came_first():
    """In evaluation mode it hands on its input, and is no layer."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        F.cross_entropy(model.eval()(few()[0]), few()[1])
        F.cross_entropy(model.train()(few()[0]), few()[1]).backward()
        optimizer.step()
    assert str(seen).startswith("no defect in 1 update: 3 of 3 layers and 4 of 4 parameters")


@pytest.mark.slow
def test_evaluation_with_gradients_is_not_kept():
    torch.manual_seed(0)
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        for _ in range(2):
            F.cross_entropy(model(few()[0]), few()[1]).backward()
            for _ in range(20):
                model(few()[0]).argmax()
        calls = seen.look.sums.calls
        kept = [len(calls.made()), *map(len, calls.recorder.record.calls.values())]
        optimizer.step()
    assert (causes(seen), seen.not_examined) == ([], [])
    assert seen.facts["micro_batches"] == 2
    assert kept == [3] * 4  # the graph of the last call was still there: no further call came


PARTS = [
    "mpcompare.watching.calls.Calls.begin",
    "mpcompare.watching.stepping.Steps.before",
    "mpcompare.verdict.examine.forced.recorder.Recorder.returned",
    "mpcompare.watching.tape.Tape.end",
    "mpcompare.watching.watched.facts_of",
]


@pytest.mark.parametrize("part", PARTS)
def test_an_error_of_the_watch_does_not_come_to_the_loop(part, monkeypatch):
    TINY.run()
    right = TINY.weights()

    def broken(*given):
        raise RuntimeError("no memory")

    monkeypatch.setattr(part, broken)
    seen = TINY.run(mpcompare.watch)
    assert all(torch.equal(a, b) for a, b in zip(right, TINY.weights(), strict=True))
    assert seen.verdict == NOTHING
    assert str(seen).startswith("nothing was seen: the watch itself stopped with an error\n")
    assert seen.not_examined == ["what came after the watch itself stopped with RuntimeError: no memory"]
    assert torch.overrides._get_current_function_mode_stack() == []


def test_other_hooks_of_the_optimizer_are_called_after_the_watch_has_ended():
    loop, called = replace(TINY, updates=3), []
    loop.before_step = lambda model: (
        called or loop.made["optimizer"].register_step_post_hook(lambda *_: called.append(1))
    )
    loop.run(mpcompare.watch, steps=1)
    assert len(called) == 3
    assert len(loop.made["optimizer"]._optimizer_step_post_hooks) == 1


def test_a_norm_of_clipping_that_never_binds():
    """The norm is the argument of torch's function. A norm by hand is not known, and no gradient is above it."""
    seen = replace(TINY, clip=50.0).run(mpcompare.watch)
    assert (seen.facts["clip_norm"], seen.facts.get("clipped_updates")) == (50.0, None)
    seen.raise_if_wrong(expect={"clip_norm": 50.0})

    def by_hand(model):
        norm = torch.stack([torch.linalg.vector_norm(p.grad) for p in model.parameters()]).norm()
        if norm > 50:
            raise AssertionError

    seen = replace(TINY, before_step=by_hand).run(mpcompare.watch)
    seen.raise_if_wrong(expect={"clip_norm": 50.0})
    with pytest.raises(WrongTraining, match=r"clip_norm is none: a gradient of norm .* expected 1e-06"):
        seen.raise_if_wrong(expect={"clip_norm": 1e-6})
    with pytest.raises(WrongTraining, match="clip_norm is none, expected 50"):
        TINY.run(mpcompare.watch).raise_if_wrong(expect={"clip_norm": 50.0})


def test_a_norm_of_each_tensor_is_no_norm_of_all_gradients():
    def each(model):
        for p in model.parameters():
            nn.utils.clip_grad_norm_([p], 0.01)

    seen = replace(TINY, before_step=each).run(mpcompare.watch)
    with pytest.raises(WrongTraining, match="clip_norm is no norm of all gradients"):
        seen.raise_if_wrong(expect={"clip_norm": 0.01})


def test_a_block_that_ends_before_looking_begins_says_so():
    seen = TINY.run(lambda *given: mpcompare.watch(*given, after=100))
    assert str(seen) == "nothing was seen: the block has 1 updates, and looking begins after 100"


def test_a_weight_that_the_loop_detaches():
    def make():
        model = two_layers()
        model[1].forward = lambda x: F.linear(x, model[1].weight.detach(), model[1].bias)
        return model

    seen = replace(TINY, make=make).run(mpcompare.watch)
    assert (seen.defects[0].cause, seen.defects[0].place) == ("gradient missing", "1.weight")


def test_gradients_of_some_tensors_that_stay_scaled():
    def scale_again(model):
        loop.made["scaler"].unscale_(loop.made["optimizer"])
        model[1].weight.grad.mul_(loop.scale)

    loop = replace(TINY, dtype=torch.float16, before_step=scale_again)
    assert [(d.cause, d.place) for d in loop.run(mpcompare.watch).defects] == [("gradient scaled", "1.weight")]


@pytest.mark.parametrize("clears", [True, False])
def test_updates_that_are_left_out_without_a_scaler_where_gradients_are_nan(clears):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        for factor in (1.0, torch.nan, 1.0):
            x, y = few()
            F.cross_entropy(model(x * factor), y).backward()
            finite = nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
            if finite:
                optimizer.step()
            if finite or clears:
                optimizer.zero_grad()
    assert causes(seen) == ([] if clears else ["accumulation"])
    assert seen.facts["backwards_left_out"] == (1 if clears else 0)


@pytest.mark.parametrize("left_out", [{1}, {0, 1, 2}])
def test_batches_are_left_out_on_purpose_but_not_before_each_update(left_out):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        for update in range(3):
            for factor in [4.0, 1.0] if update in left_out else [1.0]:
                x, y = few()
                F.cross_entropy(factor * model(x), y).backward()
                if factor == 1:
                    optimizer.step()
                optimizer.zero_grad()
    assert causes(seen) == (["accumulation"] if len(left_out) == 3 else [])
    assert seen.facts["backwards_left_out"] == len(left_out)


@pytest.mark.slow
def test_a_loss_scale_that_fp16_does_not_hold():
    class InFp16(torch.amp.GradScaler):
        def scale(self, outputs):
            super().scale(outputs.detach())
            return outputs.half() * self._scale.half()

    original, torch.amp.GradScaler = torch.amp.GradScaler, InFp16
    try:
        loop = replace(TINY, dtype=torch.float16, updates=2)
        assert causes(replace(loop, scale=2.0**16).run(mpcompare.watch)) == ["loss scale"]
        assert causes(replace(loop, scale=2.0**12).run(mpcompare.watch)) == []
    finally:
        torch.amp.GradScaler = original


def test_clipping_before_backward():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(2):
            x, y = few()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert causes(seen) == ["clip"]


def test_batch_norm_that_backward_computes_once_more():
    def make():
        body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        return Recomputes(body)

    class Recomputes(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    seen = replace(TINY, make=make).run(mpcompare.watch)
    assert ("running statistics", "body.1") in [(d.cause, d.place) for d in seen.defects]
    assert "backward computes body.1 once more" in str(seen)


def test_a_reentrant_checkpoint_without_gradient():
    class Recomputes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    with pytest.warns(UserWarning, match="Gradients will be None"):
        seen = replace(TINY, make=Recomputes).run(mpcompare.watch)
    assert ("gradient missing", "first.weight") in [(d.cause, d.place) for d in seen.defects]


def test_a_body_that_no_optimizer_has():
    """A head is trained. Nobody clears the gradients of the body, and nobody uses them."""
    model = two_layers()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        for _ in range(3):
            x, y = few()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (causes(seen), seen.not_examined) == ([], [])
    assert seen.facts["in_no_optimizer"] == ["0.bias", "0.weight"]


@pytest.mark.slow
def test_autocast_within_the_network_and_clipped_values():
    class Casts(nn.Sequential):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return super().forward(x)

    def clip(model):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    def make():
        return Casts(*two_layers(), nn.LayerNorm(3))

    seen = replace(TINY, make=make, dtype=torch.float32, before_step=clip).run(mpcompare.watch)
    assert (causes(seen), seen.not_examined, seen.facts["autocast"]) == ([], [], "bf16")


def test_a_compiled_network_shows_its_autocast_and_not_the_precision_of_its_layers():
    seen = replace(TINY, make=lambda: torch.compile(two_layers(), backend="eager")).run(mpcompare.watch)
    assert causes(seen) == []
    seen.raise_if_wrong(expect={"autocast": "bf16"})
    with pytest.raises(WrongTraining, match="precision is not known: no layer was seen, expected bf16"):
        seen.raise_if_wrong(expect={"precision": "bf16"})


def test_clipping_before_unscaling():
    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    seen = replace(TINY, dtype=torch.float16, before_step=clip).run(mpcompare.watch)
    assert causes(seen) == ["clip"]
    assert "test_watch.py" in seen.defects[0].sentence
    assert seen.facts["clip_place"] == "before unscaling"


@pytest.mark.slow
def test_a_second_step_on_the_same_gradients():
    loop = replace(BF16)
    loop.before_step = lambda model: loop.made["optimizer"].step()
    assert "update again" in causes(loop.run(mpcompare.watch))


@pytest.mark.slow
def test_gradients_that_nobody_clears():
    loop = replace(BF16)
    loop.after_step = lambda model: setattr(loop.made["optimizer"], "zero_grad", lambda: None)
    seen = loop.run(mpcompare.watch)
    assert causes(seen) == ["accumulation"]
    assert "cleared" in seen.defects[0].sentence


@pytest.mark.slow
def test_gradients_that_are_cleared_between_micro_batches():
    loop = replace(BF16)
    calls = []

    def clear(model):
        calls.append(1)
        if len(calls) % 2:
            model.zero_grad()

    loop.after_backward = clear
    assert causes(loop.run(mpcompare.watch)) == ["accumulation"]


@pytest.mark.slow
def test_gradients_that_are_rounded_to_16_bits():
    def rounded(model):
        for p in model.parameters():
            p.grad = p.grad.bfloat16().float()

    loop = replace(BF16, accumulate=16, before_step=rounded)  # sums of few numbers of 16 bits have 16 bits, too
    assert causes(loop.run(mpcompare.watch)) == ["gradient format"]


@pytest.mark.slow
def test_a_loss_that_is_not_scaled_and_gradients_that_are_unscaled():
    class NoScale(torch.amp.GradScaler):
        def scale(self, outputs):
            super().scale(torch.ones(()))
            return outputs

    loop = replace(FP16)
    original = torch.amp.GradScaler
    torch.amp.GradScaler = NoScale
    try:
        seen = loop.run(mpcompare.watch)
    finally:
        torch.amp.GradScaler = original
    assert "gradient scaled" in causes(seen)


@pytest.mark.slow
def test_gradients_that_stay_scaled():
    loop = replace(FP16, clip=None)
    loop.before_step = lambda model: setattr(loop.made["scaler"], "step", lambda optimizer: optimizer.step())
    loop.after_backward = lambda model: setattr(loop.made["scaler"], "update", lambda: None)
    seen = loop.run(mpcompare.watch)
    assert causes(seen) == ["gradient scaled"]
    assert "times the loss scale 4096" in seen.defects[0].sentence


class OwnAdam(torch.optim.Optimizer):
    """Adam without the correction of its means."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-1e-3)


@pytest.mark.slow
def test_a_known_mistake_of_an_optimizer():
    seen = replace(BF16, optimizer=OwnAdam).run(mpcompare.watch)
    assert causes(seen)[0] == "bias correction"


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        lambda p: torch.optim.NAdam(p, lr=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
    ],
)
@pytest.mark.slow
def test_optimizers_that_are_right(make):
    for loop in (FP16, BF16):
        seen = replace(loop, optimizer=make, updates=3).run(mpcompare.watch)
        assert seen.defects == [], str(seen)
        assert not seen.not_examined


@pytest.mark.slow
def test_a_norm_that_stays_in_16_bits():
    def make():
        model = small_network()
        model[4].bfloat16()
        return model

    seen = replace(BF16, make=make).run(mpcompare.watch)
    assert ("normalization", "4") in [(d.cause, d.place) for d in seen.defects]


def test_nothing_seen_is_no_pass():
    model = nn.Linear(2, 2)
    with mpcompare.watch(model, torch.optim.SGD(model.parameters())) as seen:
        model(torch.ones(1, 2)).sum().backward()
    assert seen.verdict == NOTHING
    assert NOTHING in str(seen)
    with pytest.raises(WrongTraining, match=NOTHING):
        seen.raise_if_wrong()
    with pytest.raises(InputError, match="there is no card"):
        seen.save("card.json")


def test_a_forward_that_is_called_directly_is_said():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with mpcompare.watch(model, optimizer) as seen:
        model.forward(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert seen.defects == []
    assert "not examined: the gradients of update 1" in str(seen)


def test_bad_input_is_one_line():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InputError, match="has none of the parameters of Linear"):
        mpcompare.watch(other, optimizer)
    with pytest.raises(InputError, match=r"expected a torch.nn.Module"):
        mpcompare.watch(optimizer, optimizer)
    hides = nn.Sequential(nn.Linear(4, 4))
    hides[0].parameters = [hides[0].weight]
    with pytest.raises(InputError, match="model=0: has an attribute parameters, which hides the method"):
        mpcompare.watch(hides, torch.optim.SGD(hides[0].parameters, lr=0.1))
    with pytest.raises(InputError, match="expected a torch.optim.Optimizer"):
        mpcompare.watch(model, None)
    with mpcompare.watch(model, optimizer), pytest.raises(InputError, match="is watched already"):
        mpcompare.watch(model, optimizer).__enter__()
    with mpcompare.watch(model, optimizer):  # the network is free again
        pass


def test_copies_and_files_of_a_watched_network_are_not_watched():
    model = TINY.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer) as seen:
        average = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for _ in range(2):
            x, y = few()
            F.cross_entropy(model(x), y).backward()
            F.cross_entropy(average(x), y)
            loaded(x)
            optimizer.step()
            optimizer.zero_grad()
    assert seen.defects == []
    assert seen.facts["micro_batches"] == 1


@pytest.mark.slow
def test_two_watches_at_once_and_an_error_in_one():
    loop = replace(BF16, updates=1)
    first, second = replace(loop), replace(loop, seed=1)
    seen = {}

    def outer(model, optimizer, **options):
        seen["inner"] = second.run(mpcompare.watch)
        return mpcompare.watch(model, optimizer, **options)

    assert first.run(outer).defects == []
    assert seen["inner"].defects == []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ZeroDivisionError), mpcompare.watch(model, optimizer):
        raise ZeroDivisionError
    assert not model._forward_hooks
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_look_that_ends_within_backward_leaves_nothing():
    model = two_layers()
    optimizers = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}
    for p, optimizer in zip(model.parameters(), optimizers.values(), strict=True):
        p.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    with mpcompare.watch(model, optimizers, steps=1, every=2) as seen:
        for _ in range(5):
            x, y = few()
            F.cross_entropy(model(x), y).backward()
            model.zero_grad()
    assert seen.facts["updates"] == len(optimizers)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.slow
@pytest.mark.parametrize("adds", ["assigned", "copied"])
def test_a_decay_by_hand_that_is_added_after_unscaling(adds):
    def decay(model):
        loop.made["scaler"].unscale_(loop.made["optimizer"])
        for p in model.parameters():
            if adds == "copied":
                p.grad.copy_(p.grad + 0.1 * p.detach())
            else:
                p.grad = p.grad + 0.1 * p.detach()

    loop = replace(TINY, dtype=torch.float16, before_step=decay)
    assert loop.run(mpcompare.watch).defects == []


@pytest.mark.slow
def test_after_and_every():
    looks, watches = [], []

    def watch(*given):
        watches.append(mpcompare.watch(*given, steps=1, after=2, every=3))
        return watches[0]

    def note(_):
        look = watches[0].look
        if look is not None and not any(other() is look for other in looks):
            looks.append(weakref.ref(look))

    seen = replace(BF16, updates=7, after_step=note).run(watch)
    assert (len(looks), looks[0]()) == (2, None)  # what the first look kept was freed
    assert (seen.facts["updates"], seen.defects) == (1, [])


@pytest.mark.slow
def test_looks_after_the_first_replay_one_update_by_turns():
    spoilt = count()

    def halve(model):
        if next(spoilt) >= 6:  # from update 4 on: there are two micro-batches
            model[2].weight.grad.mul_(0.5)

    watches = []

    def watch(*given):
        watches.append(mpcompare.watch(*given, steps=2, after=1, every=3))
        return watches[0]

    replayed = []
    loop = replace(BF16, updates=8, after_backward=halve)
    loop.after_step = lambda _: replayed.append(len(watches[0].replays))
    seen = loop.run(watch)
    assert replayed == [0, 0, 0, 2, 2, 2, 1, 1]
    assert {defect.place for defect in seen.defects} == {"2.weight"}
    assert seen.not_examined == ["the layers of other updates than one in each look after the first"]
    assert (seen.facts["updates"], seen.facts["micro_batches"]) == (1, 2)


@pytest.mark.slow
def test_a_saved_card_is_expected(tmp_path):
    seen = BF16.run(mpcompare.watch)
    seen.save(tmp_path / "card.json")
    replace(BF16, updates=3).run(mpcompare.watch).raise_if_wrong(expect=tmp_path / "card.json")
    with pytest.raises(WrongTraining, match=r"clip_norm is 0.2, expected 0.1"):
        replace(BF16, clip=0.2).run(mpcompare.watch).raise_if_wrong(expect=tmp_path / "card.json")
    with pytest.raises(InputError, match="clip_nrom"):
        seen.raise_if_wrong(expect={"clip_nrom": 1.0})
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(InputError, match="is no card"):
        seen.raise_if_wrong(expect=tmp_path / "no.json")


class Shared(nn.Module):
    """A layer that is called 24 times, which autocast copies once."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(48, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(24):
            x = self.again(x).tanh() + x / 2
        return self.last(x)


class Skips(nn.Sequential):
    """Leaves a layer out by a number that torch did not draw."""

    numbers = cycle([0.4, 0.6])

    def forward(self, x):
        return super().forward(x) if next(self.numbers) < 0.5 else self[1](x)


@pytest.mark.slow
def test_gradients_of_a_copy_are_summed_in_its_format():
    def batch():
        return torch.randn(32, 48), torch.randint(3, (32,))

    seen = replace(BF16, make=Shared, batch=batch, clip=None).run(mpcompare.watch)
    assert (causes(seen), seen.not_examined) == ([], [])


def test_a_network_that_takes_another_path_when_it_is_called_again_is_not_examined():
    seen = replace(TINY, make=lambda: Skips(nn.Linear(4, 4), nn.Linear(4, 3))).run(mpcompare.watch)
    assert causes(seen) == []
    (said,) = seen.not_examined
    assert "0 is not called when the network is called again: it draws other numbers" in said


class ChannelNorm(nn.LayerNorm):
    """A norm over channels of images with its activation, as timm writes it."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return F.silu(x.permute(0, 3, 1, 2))


class Centred(nn.BatchNorm1d):
    """A batch norm that turns its input, and a batch norm that does something else, too."""

    def forward(self, x):
        x = F.batch_norm(x.reshape(-1, 4), self.running_mean, self.running_var, self.weight, self.bias, True)
        return x if self.turns else x * 1


@pytest.mark.parametrize("turns", [True, False])
def test_looking_at_a_norm_leaves_its_statistics_and_knows_those_of_the_loop(turns):
    norm = Centred(4)
    norm.turns = turns
    network = nn.Sequential(norm)
    before = copy.deepcopy(dict(network.named_buffers()))
    with recorded(network) as record:
        network(torch.randn(8, 4)).sum().backward()
    after = copy.deepcopy(dict(network.named_buffers()))
    for name, b in network.named_buffers():
        b.copy_(before[name])
    with torch.no_grad():
        made = of_kernels(network, record, after)
    assert all(torch.equal(b, before[name]) for name, b in network.named_buffers())
    assert ("buffer 0.running_mean" in made.alike) == turns


class Masked(nn.Module):
    """An attention whose last key is masked by -100, as Swin masks: its gradients are too small for fp32."""

    def __init__(self):
        super().__init__()
        self.query, self.value, self.bias = nn.Linear(4, 3), nn.Linear(4, 9), nn.Parameter(torch.zeros(3, 16))

    def forward(self, x):
        scores = (self.query(x)[..., None] + self.bias).mean(-1) + torch.tensor([0.0, 0.0, -100.0])
        return (scores.softmax(-1)[..., None] * self.value(x).view(-1, 3, 3)).sum(-2)


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 8, 3), ChannelNorm(8), nn.Flatten(), nn.LazyLinear(3)
    )


def made(make, *shape):
    """Returns a maker of networks that have been called once."""

    def initialized():
        network = make()
        network(torch.randn(2, *shape))
        return network

    return initialized


@pytest.mark.parametrize(
    ("make", "width"),
    [
        pytest.param(made(convolutional, 256), 256, marks=pytest.mark.slow),
        (Masked, 4),
    ],
)
def test_roundings_of_torchs_own_functions_are_no_defects(make, width):
    def batch():
        return torch.randn(32, width), torch.randint(3, (32,))

    seen = replace(BF16, make=make, batch=batch, clip=None).run(mpcompare.watch)
    assert (causes(seen), seen.not_examined) == ([], [])


def test_the_first_line_says_how_far_a_look_saw():
    seen = TINY.run(mpcompare.watch)
    headline = str(seen).splitlines()[0]
    said = r"no defect in 1 update: 2 of 2 layers and 4 of 4 parameters are seen; "
    said += r"an error of \S+ % or more in a gradient would have been found"
    assert re.fullmatch(said, headline), headline
    assert 0 < seen.sight.resolution < 0.1
    assert seen.sight.not_flagged == []


def test_a_last_look_without_an_update_leaves_the_card_and_its_sight():
    torch.manual_seed(0)
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1, every=1) as seen:
        for updates in (True, False):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if updates:
                optimizer.step()
    assert str(seen).startswith("no defect in 1 update: 2 of 2 layers and 4 of 4 parameters are seen")


@pytest.mark.parametrize("calls", [1, 3])
def test_a_loss_of_features_alone_is_replayed(calls):
    torch.manual_seed(0)
    model, kept = two_layers(), []
    model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        for _ in range(calls):
            model(torch.randn(8, 4))
        torch.cat(kept).square().mean().backward()
        optimizer.step()
    assert (seen.defects, seen.not_examined) == ([], []), str(seen)
    assert seen.sight.layers["0"]


class Compiler:
    """A backend of ``torch.compile`` that counts the calls of its compiled functions."""

    def __init__(self):
        self.calls = 0

    def __call__(self, graph, examples):
        def run(*given):
            self.calls += 1
            return graph.forward(*given)

        return run


def trained_with(compiler, kind, watch, updates):
    """Trains a network with a compiled loss. The network is compiled as a whole, in place, or in a block."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), nn.Linear(16, 4))
    outer = torch.compile(model, backend=compiler) if kind == "whole" else model
    if kind == "in place":
        model.compile(backend=compiler)
    if kind == "block":
        model[1] = torch.compile(model[1], backend=compiler)
    loss_of = torch.compile(lambda output, y: F.cross_entropy(output.float(), y), backend=compiler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    with watch(outer, optimizer) as seen:
        for _ in range(updates):
            before, x, y = compiler.calls, torch.randn(32, 8), torch.randint(4, (32,))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(outer(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            calls.append(compiler.calls - before)
    return seen, calls


def test_a_compiled_network_is_said_not_to_be_seen():
    seen, calls = trained_with(Compiler(), "whole", mpcompare.watch, 1)
    assert str(seen).startswith("the gradients of 1 update are not seen, and the rest has no defect\n")
    assert seen.verdict == "gradients not seen"
    assert "layers within compiled modules (eager=True shows them)" in seen.not_examined
    assert calls == [2]


@pytest.mark.parametrize("kind", slow_after(1, ["block", "whole", "in place"]))
def test_a_compiled_network_is_seen_where_it_runs_without_the_compiler(kind):
    seen, calls = trained_with(Compiler(), kind, partial(mpcompare.watch, steps=1, after=1, eager=True), 4)
    assert (seen.defects, seen.not_examined) == ([], ["compiled code: the updates ran without a compiler"])
    assert (len(seen.sight.layers), all(seen.sight.layers.values())) == (4, True)
    assert seen.facts["loss"] == "cross_entropy in fp32"
    assert calls[0] > 0  # torch 2.11 compiles one graph, torch 2.15 two
    assert calls == [calls[0], 0, calls[0], calls[0]]


@pytest.mark.parametrize(
    ("expect", "line"),
    [
        (
            {"precision": "bfloat16"},
            "watch: expect=precision=bfloat16: expected one of fp32, tf32, bf16, fp16 (did you mean bf16?)",
        ),
        ({"clip_norm": "one"}, "watch: expect=clip_norm=one: expected a number, or None"),
        ({"autocast": "half"}, "watch: expect=autocast=half: expected one of none, bf16, fp16"),
    ],
)
def test_a_fact_that_cannot_be_is_bad_input_and_no_wrong_training(expect, line):
    seen = TINY.run(mpcompare.watch)
    with pytest.raises(InputError) as caught:
        seen.raise_if_wrong(expect=expect)
    assert str(caught.value).startswith(line)
