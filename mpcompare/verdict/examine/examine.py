"""The pass that asks what a backend computes: it is driven where its errors show, and what it does is written down.

first       from the initial weights: loss and gradients beside the float64 oracle, updates beside fp32 arithmetic
last        the trained backend's next step: its gradients beside those of a new one that starts from its weights
overflow    from the initial weights with a loss scale that is too large, and with an infinite input
reload      a new backend that loaded the state of another, beside that other, step by step
policy      the loss scale of every training step, beside the one that the policy asks for
noise       trained again under changes that must not matter: how far apart may two correct runs be? (noise.py)

The passes ``first`` and ``overflow`` are taken at the network's smooth twin where it has one (tasks/twin.py). What is
found are numbers; what they mean is said in verdict/judge.
"""

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.checkpoints import Checkpoint
from mpcompare.contract import Backend, Batches, Stepper, show_gradients, take_step
from mpcompare.dtypes import DTYPES, dtype_name, unit_roundoff
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, load_state
from mpcompare.race.turns import Progress
from mpcompare.shared import ALONE, Shared
from mpcompare.tasks.task import Params, Task, params_of, with_values
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.known_mistakes import Update, other_rules, some_of
from mpcompare.verdict.examine.noise import at_scale, train_again
from mpcompare.verdict.examine.oracle import Exact, exact_step
from mpcompare.verdict.examine.rounding import rounding_errors
from mpcompare.verdict.reading import factor_of_norm, relative_error

Found = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        make_backend: a new backend from a network with initial weights and a policy, both of which it copies.
        model: the network with its initial weights, fp32 on the device.
        policy: the loss scale as it starts.
        precision: resolved.
        batches: the training batches from the first on.
        twin: the smooth twin at which the first passes are taken; None: the network itself.
        replaced: what became of which layer there.
        start: where training continued from; None: it began at the initial weights.
        shared: with the other entrants of a race: the oracle of the first step is the same for all.
    """

    make_backend: Callable[[nn.Module, LossScale], Backend]
    model: nn.Module
    policy: LossScale
    precision: str
    task: Task
    batches: Callable[[], Iterator[Batches]]
    twin: nn.Module | None = None
    replaced: Mapping[str, str] | None = None
    start: Checkpoint | None = None
    shared: Shared = ALONE

    @property
    def examined(self) -> nn.Module:
        """The network of the first passes."""
        return self.model if self.twin is None else self.twin

    @property
    def policy_at_start(self) -> LossScale:
        """The loss scale before the first step of training."""
        policy = copy.deepcopy(self.policy)
        if self.start is not None:
            load_state(policy, self.start.state["loss_scale"])
        return policy


def examine(
    subject: Subject, stepper: Stepper, rows: Sequence[dict[str, Any]], noise: int
) -> Generator[Progress, Any, Found]:
    """Everything above.

    Args:
        stepper: the backend that training left, with all that it has become, and its next learning rate.
        rows: of ``steps.csv``.
        noise: how many more runs measure the noise; 0 for a backend that others are not compared with.
    """
    trained = stepper.backend
    initial, weights = params_of(subject.model), _copy(trained.master_params())
    found: Found = {"policy": _first_wrong_scale(subject.policy_at_start, rows)}

    yield Progress(0, 1, "numerics: gradients of the first step")
    batches = list(islice(subject.batches(), 4))
    exact = _oracle(subject, batches[0], subject.precision)
    # The second step shows another learning rate, and what the optimizer remembers; the third, how well: what it
    # remembers of one gradient has no more digits than that.
    follow = batches[1:3] if subject.task.optimizer.remembers else batches[1 : 1 + bool(subject.task.schedule.length)]
    found["first"] = _watch(subject, subject.policy, batches[0], follow, exact)
    found["rounding"] = _rounding(subject, batches[0])
    found["twin"] = dict(subject.replaced or {})
    found["layers"] = layers(subject.examined, exact.order, batches[0][0][0][:4])

    yield Progress(0, 1, "numerics: gradients after training")
    after = next(islice(subject.batches(), rows[-1]["step"], None))
    network = with_values(subject.model, weights, trained.buffers())
    found["last"] = _beside_a_new_one(subject, stepper, network, after)
    found["exponents"] = {}
    if noise:
        last = exact_step(network, subject.task.loss_fn, after, subject.precision, count=True, dtype=torch.float32)
        first_updates = _update_exponents(subject, initial, exact.grads)
        last_updates = _update_exponents(subject, weights, last.grads)
        found["exponents"] = {
            "first": {**exact.exponents, "updates": first_updates},
            "last": {**last.exponents, "updates": last_updates},
        }

    if not isinstance(subject.policy, NoLossScale):
        yield Progress(0, 1, "numerics: overflow")
        policy = _too_large(subject.policy, exact.largest)
        follow = batches[1:]
        (x, y), *others = batches[3]
        if x.is_floating_point():  # in one micro-batch, if there are several: it must not be forgotten
            follow.insert(2, [(torch.full_like(x, math.inf), y), *others])
        found["overflow"] = _watch(subject, policy, batches[0], follow, exact)
    yield Progress(0, 1, "numerics: a backend that is loaded")
    found["reload"] = _reload(subject, batches)

    found["noise"] = []
    for number in range(noise):
        yield Progress(number, noise, f"numerics: noise, run {number + 1} of {noise}")
        again = train_again(
            subject.make_backend, subject.model, subject.policy_at_start, subject.task, subject.precision,
            subject.batches, len(rows), number, keep_scale=any(row["skipped"] for row in rows), begin=subject.start,
        )  # fmt: skip
        found["noise"].append((yield from again))
    found["unit_roundoff"] = unit_roundoff(subject.precision)
    found |= recipe(subject.task)
    found["longest_sum"] = longest_sum(subject.model, batches[0][0][0], subject.task.batch_size)
    return found


def recipe(task: Task) -> Found:
    """What of the task decides how its numbers are read."""
    return {
        "batch_size": task.batch_size,
        "accumulate": task.accumulate,
        "clip_norm": task.clip_norm,
        "clip_norm_type": task.clip_norm_type,
        "linear": task.optimizer.linear,
    }


def layers(model: nn.Module, order: Sequence[str], x: Tensor) -> dict[str, dict[str, Any]]:
    """Whose each parameter and buffer is.

    Returns:
        By tensor: ``layer`` (its name), ``kind`` (its class), ``inside`` (the classes of the modules around it),
        ``part`` (``weight``, ...), its ``place`` among the layers in the order of their calls, -1 for one that is no
        layer of its own, and ``after``, the layer whose output is its input as it is; empty where there is none.
    """
    places, feeds = {name: place for place, name in enumerate(order)}, _feeds(model, x)
    found = {}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        layer, _, part = name.rpartition(".")
        path = layer.split(".")
        around = [".".join(path[:depth]) for depth in range(len(path))]
        found[name] = {
            "layer": layer,
            "kind": type(model.get_submodule(layer)).__name__,
            "inside": [type(model.get_submodule(outer)).__name__ for outer in around],
            "part": part,
            "place": places.get(layer, -1),
            "after": feeds.get(layer, ""),
        }
    return found


def _feeds(model: nn.Module, x: Tensor) -> dict[str, str]:
    """By layer, the one whose output it is given as it is."""
    model = copy.deepcopy(model)
    made: dict[int, str] = {}
    found: dict[str, str] = {}
    kept = []  # an output that is gone could lend its id to another
    for name, module in model.named_modules():
        if any(True for _ in module.children()):
            continue

        def hook(_: nn.Module, args: tuple[Any, ...], output: Any, name: str = name) -> None:
            if args and id(args[0]) in made:
                found[name] = made[id(args[0])]
            made[id(output)] = name
            kept.append(output)

        module.register_forward_hook(hook)
    with torch.no_grad():
        model(x)
    return found


def longest_sum(model: nn.Module, x: Tensor, rows: int) -> int:
    """About how many numbers are summed at most: those of a row of a weight, or those of one channel in a batch, all
    its places (pixels, tokens) in all its ``rows``."""
    few, lengths = x[:4], [rows]
    lengths += [p[0].numel() if p.dim() > 1 else len(p) for p in model.parameters() if p.dim()]

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        values = output[0] if isinstance(output, tuple) else output
        if isinstance(values, Tensor) and values.dim() > 1:
            channels_first = isinstance(module, (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase))
            channels = values.shape[1 if channels_first else -1]
            lengths.append(values.numel() // channels // len(few) * rows)

    model = copy.deepcopy(model)
    for module in model.modules():
        module.register_forward_hook(hook)
    with torch.no_grad():
        model(few)
    return max(lengths)


def _copy(tensors: Mapping[str, Tensor]) -> Params:
    """Each as it lies in memory."""
    return {name: t.detach().clone() for name, t in tensors.items()}


def _by_rows(tensors: Mapping[str, Tensor]) -> Params:
    """A copy of each that lies row by row, as the oracle's gradients do."""
    return {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}


def _gradients(backend: Any, batch: Batches, lr: float, keep: Callable[..., Params] = _copy) -> tuple[float, Params]:
    """``contract.show_gradients`` as values that stay."""
    loss, grads = show_gradients(backend, batch, lr)
    return float(loss), keep(grads)


def _finish_step(backend: Any, lr: float) -> Iterator[None]:
    """The rest of it: once up to the clipped gradients, once to the updated weights, once to its end."""
    if not hasattr(backend, "train_step"):
        backend.clip()
    yield
    if not hasattr(backend, "train_step"):
        backend.step(lr)
    yield
    if not hasattr(backend, "train_step"):
        backend.update()


def _oracle(subject: Subject, batch: Batches, precision: str, dtype: torch.dtype = torch.float64) -> Exact:
    """Of the first batch at the initial weights; shared, for it is the same for all entrants of a race."""
    count = precision in ("fp16", "bf16") and dtype is torch.float64  # of the others no exponent is asked for

    def make() -> dict[str, Any]:
        return vars(exact_step(subject.examined, subject.task.loss_fn, batch, precision, count=count, dtype=dtype))

    return Exact(**subject.shared.once(f"oracle-{precision}-{dtype_name(dtype)}", make))


def _rounding(subject: Subject, batch: Batches) -> dict[str, dict[str, float]]:
    """What one rounding of each result does to the gradients of the first step; shared, too."""

    def make() -> dict[str, dict[str, float]]:
        return rounding_errors(subject.examined, subject.task.loss_fn, batch, subject.precision)

    return subject.shared.once(f"rounding-{subject.precision}", make)


def _update_exponents(subject: Subject, params: Params, grads: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """``numerics.exponents`` of ``|first update| / |w|`` from these gradients, by parameter."""
    rule, found = subject.task.optimizer, {}
    for name in grads:
        counts = []
        for w, g in numerics.chunks(params[name], grads[name]):
            w = w.double()
            update, _ = rule.replay().step(name, g.double(), w, rule.lr)
            no_weight = w == 0
            count = numerics.exponents(update.div_(w).masked_fill_(no_weight, 0))
            count[0] -= int(no_weight.sum())
            counts.append(count)
        found[name] = torch.stack(counts).sum(dim=0).tolist()
    return found


def _effective_precision(subject: Subject, batch: Batches, grads: Params, errors: Found) -> str:
    """The precision that the gradients show: the one asked for, beside whose oracle they have ``errors``, unless
    another's is far closer, and closer in every tensor: below a unit next to 0 that turned on or off any may be."""
    found, error = subject.precision, _largest(errors)
    if found in ("fp32", "tf32") or error <= torch.finfo(DTYPES[found]).eps:
        return found  # others need not be tried

    def errors_beside(other: str, dtype: torch.dtype) -> Found:
        return numerics.gradient_errors(grads, _oracle(subject, batch, other, dtype).grads)

    def closer(there: Found) -> bool:
        each = all(relative_error(there[name]) <= relative_error(errors[name]) for name in errors)
        return each and _largest(there) < error / 4

    for other in ("fp32", "fp16", "bf16"):
        if DTYPES[other] is DTYPES[subject.precision]:
            continue
        rough = errors_beside(other, torch.float32)  # in fp32 arithmetic it costs a quarter, and rules most of them out
        if closer(rough) and closer(there := errors_beside(other, torch.float64)):
            found, error = other, _largest(there)
        elif (subject.precision, other) == ("bf16", "fp32") and _largest(rough) >= error:
            break  # fp16's oracle lies between the two, so it is not that one either
    return found if error <= 8 * torch.finfo(DTYPES[found]).eps else subject.precision


def _largest(errors: Found) -> float:
    """Relative error of all tensors."""
    return max(map(relative_error, errors.values()))


def _beside(loss: float, grads: Params, exact: Exact) -> Found:
    """``gradients`` only if any are shown, and ``micro_batches`` (``numerics.shares_of``) only if there are several."""
    found: Found = {"loss": loss, "exact_loss": exact.loss, "loss_noise": exact.loss_noise}
    if grads:
        found["gradients"] = numerics.gradient_errors(grads, exact.grads)
    if grads and exact.shares:
        found["micro_batches"] = numerics.shares_of(grads, exact.shares)
    return found


def _beside_a_new_one(subject: Subject, stepper: Stepper, network: nn.Module, batch: Batches) -> Found:
    """Loss and gradients of the trained backend beside those of a new one from the same weights at the same loss scale.

    Both round alike, so they are equal but for the order of sums, unless the trained one computes with anything else
    than its weights. Beside the oracle a unit next to 0 could make up for all of the error.
    """
    trained, lr = stepper.backend, float(stepper.rates.now)
    policy = at_scale(subject.policy, float(trained.loss_scale()))
    new = subject.make_backend(network, policy)
    loss, grads = _gradients(trained, batch, lr)
    list(_finish_step(trained, lr))
    new_loss, new_grads = _gradients(new, batch, lr)
    return _beside(loss, grads, Exact(new_loss, new_grads, {}, 0.0))


RETRIES = 40  # a scale of 2^24 that halves gets everywhere in fewer


def _watch(subject: Subject, policy: LossScale, start: Batches, follow: Sequence[Batches], exact: Exact) -> Found:
    """A new backend takes the batch ``start`` until its gradients are finite, then the batches ``follow``.

    Returns:
        ``steps``: what the policy and the parameters did in each; ``updates``: those of ``numerics.update_errors``, and
        ``rates``, theirs; ``clips``: those of ``numerics.clip_errors``, where the task clips; where updates are wrong,
        ``other_rules`` and ``digits``, as those functions say;
        and of the first finite step of ``start``, if there was one: ``loss``, ``gradients`` and ``first_update`` beside
        the oracle, and ``buffers`` where it was the first of all; ``subnormal`` as in ``Exact``.
    """
    backend = subject.make_backend(subject.examined, policy)
    policy, replay = copy.deepcopy(policy), subject.task.optimizer.replay()
    task, checks, rates = subject.task, not isinstance(policy, NoLossScale), subject.task.new_rates()
    found: Found = {"steps": [], "updates": [], "rates": [], "clips": []}
    at_once = hasattr(backend, "train_step")  # then the gradients that it shows are clipped ones
    kept: list[Update] = []

    def take(batch: Batches) -> bool:
        before, scale = _by_rows(backend.master_params()), float(backend.loss_scale())
        lr = float(rates.now)
        loss, grads = _gradients(backend, batch, lr, _by_rows)
        early = task.accumulate > 1 and not at_once and _moved(before, backend.master_params())
        rest = _finish_step(backend, lr)
        next(rest)
        clipped = grads if at_once or task.clip_norm is None else _by_rows(backend.grads())
        next(rest)
        after, skipped = _by_rows(backend.master_params()), bool(backend.skipped)
        next(rest, None)
        finite = _finite(grads)
        found["steps"].append(
            {
                "finite": finite,
                "skipped": skipped,
                "should_skip": checks and not finite,
                "moved": _moved(before, after),
                "moved_early": early,
                "finite_after_clip": finite if clipped is grads else _finite(clipped),
                "loss_scale": scale,
                "should_scale": policy.scale,
            }
        )
        policy.update(not finite)
        rates.count(checks and not finite)
        found["next_scale"] = {"loss_scale": float(backend.loss_scale()), "should_scale": policy.scale}
        if finite and not skipped:
            errors = numerics.update_errors(replay, before, after, clipped, lr, DTYPES[subject.precision])
            found["updates"].append(errors)
            found["rates"].append(lr)
            weights, gradients = (some_of(before), some_of(after)), (some_of(grads), some_of(clipped))
            kept.append(Update(*weights, *gradients, lr, int(rates.updates) - 1, len(found["steps"]) - 1))
            if grads and task.clip_norm is not None:
                shown = None if at_once else grads
                norm = float("nan") if backend.grad_norm is None else float(backend.grad_norm)
                found["clips"].append(numerics.clip_errors(shown, clipped, norm, task.clip_norm, task.clip_norm_type))
        if finite and "first_update" not in found:
            found["subnormal"] = exact.subnormal(subject.policy.scale)
            found["first_update"] = _first_update(subject, before, after, exact.grads, lr)
            if at_once and (factor := _own_factor(backend, task)) < 1:
                grads = {name: g / factor for name, g in grads.items()}
            found.update(_beside(loss, grads, exact))
            if grads:
                found["effective_precision"] = _effective_precision(subject, start, grads, found["gradients"])
            if exact.buffers and len(found["steps"]) == 1:
                found["buffers"] = numerics.gradient_errors(backend.buffers(), exact.buffers)
        return finite

    for _ in range(RETRIES):
        if take(start) or not isinstance(policy, DynamicLossScale):
            break
    for batch in follow:
        take(batch)
    if any(not e["excess"] <= 1 for update in found["updates"] for e in update.values()):
        found["other_rules"] = other_rules(task, kept, DTYPES[subject.precision])
        found["digits"] = _digits(backend.state_dict()["optimizer"])
    return found


def _own_factor(backend: Any, task: Task) -> float:
    """What a backend multiplied its gradients by when it clipped them, by the norm that it says they had."""
    norm = math.nan if backend.grad_norm is None else float(backend.grad_norm)
    return factor_of_norm(norm, task.clip_norm) if task.clip_norm is not None and norm >= 0 else 1.0


def _digits(state: Mapping[str, Params]) -> dict[str, float]:
    """Of what the optimizer remembers, by kind: which part of the numbers that are not 0 has no more digits than fp16
    or bf16."""
    found = {}
    for kind, tensors in state.items():
        values = torch.cat([t.detach().flatten() for t in tensors.values() if t.dim()] or [torch.zeros(0)])
        if len(values := values[values != 0]):
            shares = [(values.to(dtype).float() == values).double().mean() for dtype in (torch.float16, torch.bfloat16)]
            found[kind] = float(max(shares))
    return found


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors.values())


def _moved(before: Params, after: Mapping[str, Tensor]) -> bool:
    return any(not numerics.same_bits(before[name], after[name]) for name in before)


def _first_update(
    subject: Subject, before: Params, after: Params, exact: Mapping[str, Tensor], lr: float
) -> dict[str, dict[str, float]]:
    """``error``: of the update beside the one that the oracle's gradients make; ``norm`` and ``largest`` element of
    that, and the norm of the ``weights``; ``gain``: what a gradient is multiplied by, by a rule that is linear."""
    rule, found = subject.task.optimizer, {}
    factor = numerics.clip_factor(exact, subject.task.clip_norm, subject.task.clip_norm_type)
    for name in exact:
        largest, squares = [], []
        for w, new, g in numerics.chunks(before[name], after[name], exact[name]):
            w = w.double()
            step, _ = rule.replay().step(name, g * factor, w, lr)
            decay, _ = rule.replay().step(name, torch.zeros_like(g), w, lr)
            largest.append(step.abs().max())
            pieces = (new.double() - w - step, step, w, step - decay, g)
            squares.append(torch.stack([torch.dot(piece, piece) for piece in pieces]))
        error, norm, weights, gain, grad = torch.stack(squares).sum(dim=0).sqrt().tolist()
        found[name] = {
            "error": error, "norm": norm, "largest": torch.stack(largest).max().item(), "weights": weights,
            "gain": gain / grad if grad else 0.0,
        }  # fmt: skip
    return found


def _too_large(policy: LossScale, largest: float) -> LossScale:
    """The policy with the smallest scale at which the largest gradient overflows in fp16, so that the others may not; a
    dynamic one then backs off far enough at once, and grows again after two good steps.

    Args:
        largest: element of what a micro-batch adds to the gradients: it is computed in 16 bits, and their sum is not.
    """
    exponent = math.ceil(math.log2(1.05 * torch.finfo(torch.float16).max / largest)) if 0 < largest < math.inf else 16
    policy = at_scale(policy, 2.0 ** min(exponent, 120))
    return (
        replace(policy, backoff_factor=2.0**-8, growth_interval=2) if isinstance(policy, DynamicLossScale) else policy
    )


def _reload(subject: Subject, batches: Sequence[Batches]) -> Found:
    """A backend takes a step, a new one loads its state, and both take another: what differs then.

    A dynamic policy grows after two good steps here, so that its state, too, shows in the second; and the new backend
    is made with another scale.

    Returns:
        ``expected`` of the first and ``found`` of the other: ``loss`` of the second step, ``loss_scale`` after it;
        ``error`` and ``norm``: how far their weights and buffers are apart then, and how far they moved; ``lost``: the
        entries of the first one's state that are others in the loaded one's, bit for bit.
    """
    policy = at_scale(subject.policy, subject.policy.scale / 256)  # so that the first step does not overflow
    if isinstance(policy, DynamicLossScale):
        policy = replace(policy, growth_interval=2)
    first, rates = subject.make_backend(subject.model, policy), subject.task.new_rates()
    Stepper(first, rates).step(batches[0])
    if isinstance(policy, DynamicLossScale):
        policy = at_scale(policy, 4 * policy.scale)
    loaded = subject.make_backend(subject.model, policy)
    state = first.state_dict()
    loaded.load_state_dict(copy.deepcopy(state))
    lost = lost_entries({**state, "params": first.master_params()}, loaded.state_dict())
    start, step = _copy(first.master_params()), {}
    for name, backend in (("expected", first), ("found", loaded)):
        loss = float(take_step(backend, batches[1], rates.now))
        step[name] = {"loss": loss, "loss_scale": float(backend.loss_scale())}
    ends = [{**backend.master_params(), **backend.buffers()} for backend in (first, loaded)]
    return {
        **step,
        "error": numerics.distance(*ends),
        "norm": numerics.distance(start, ends[0]),
        "lost": lost,
    }


def lost_entries(state: Any, loaded: Any) -> list[str]:
    """The entries of a state that are not, or not bit for bit, in another: ``params``, ``buffers``,
    ``optimizer.momentum_buffer``, ``loss_scale.growth_tracker``."""

    def tensors(mine: Params, theirs: Params) -> bool:
        return all(name in theirs and numerics.same_bits(t, theirs[name]) for name, t in mine.items())

    lost = [part for part in ("params", "buffers") if not tensors(state[part], loaded[part])]
    lost += [
        f"optimizer.{kind}"
        for kind, mine in state["optimizer"].items()
        if not tensors(mine, loaded["optimizer"].get(kind, {}))
    ]
    scales = state["loss_scale"].items()
    return [*lost, *(f"loss_scale.{name}" for name, value in scales if loaded["loss_scale"].get(name) != value)]


def _first_wrong_scale(policy: LossScale, rows: Sequence[dict[str, Any]]) -> Found | None:
    """The first training step whose loss scale is not what the policy makes of the steps that were skipped."""
    policy = copy.deepcopy(policy)
    for row in rows:
        if row["loss_scale"] != policy.scale:
            return {"step": row["step"], "loss_scale": row["loss_scale"], "should_scale": policy.scale}
        policy.update(row["skipped"])
    return None
