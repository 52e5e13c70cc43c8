"""The card: what a loop does. It accuses nobody."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mpcompare.dtypes import HALF, dtype_name
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.verdict.examine.forced.record import OUTPUT, is_real
from mpcompare.watching.events import Op
from mpcompare.watching.examining import Replayed, Updates
from mpcompare.watching.expecting import NOT_SEEN, by_value, one
from mpcompare.watching.formats import precision_of_network
from mpcompare.watching.handing_on import clipping_of, rounded
from mpcompare.watching.looking import Look
from mpcompare.watching.steps import SUMS, WEIGHS, Sum, Taken, in_turn, moved

BATCH_NORMS = nn.modules.batchnorm._BatchNorm
USUAL = ("lr", "weight_decay", "betas", "eps", "momentum")  # settings that a card always shows
HOW = ("foreach", "fused", "capturable", "differentiable")  # settings that change how a rule is computed, and no rule
SOFTMAX = ("log_softmax", "softmax", "cross_entropy", "nll_loss", "logsumexp")


def facts_of(look: Look, sums: Mapping[Sum, Replayed], updates: Mapping[str, Updates]) -> dict[str, Any]:
    """Returns the card, fact by name.

    Args:
        sums: the replay of each sum.
        updates: by name of the optimizer.
    """
    taken = [t for t in look.taken if not t.skipped]
    facts: dict[str, Any] = {"updates": len(taken), "skipped": sum(t.skipped for t in look.taken)}
    if not look.taken:
        return facts
    seen = list(dict.fromkeys(t.sum for t in look.taken if t.sum is not None))
    facts["precision"] = _known([precision_of_network(s).name for s, r in sums.items() if r.dtypes])
    facts["autocast"] = _known([s.autocast or "none" for s in seen])
    facts["layers"] = by_value({name: d for r in sums.values() for name, d in r.dtypes.items()}) or NOT_SEEN
    facts["masters"] = by_value({n: _master(t, n) for t in taken for n in t.dtypes})
    facts["moments"] = _moments(taken)
    facts["inputs"] = _known([sorted({dtype_name(t.dtype) for t in _inputs(s)}) for s in seen])
    facts["training_mode"] = _known([s.training for s in seen])
    facts |= _sums_of(seen, sums)
    facts["loss_in_16_bits"] = sorted({each for s in seen for each in _loss_in_16_bits(s)})
    facts["terms_without_gradient"] = sorted({each for s in seen for each in _constant_terms(s)})
    facts["own_backward"] = look.derivatives.said()
    facts |= clipping_of(taken)
    parts = [f"{part} ({line})" if line else part for part, line in taken[-1].order] if taken else []
    facts["order"] = [*parts, "step"]  # of the last one
    facts |= _scaling(look)
    names = {name: {type(look.attached.optimizers[name]).__name__} for name in updates}
    rules = {
        name: one(sorted(set(u.rules.values()) | (names[name] if u.unknown or not u.rules else set())))
        for name, u in updates.items()
    }
    facts["optimizer"] = rules if len(look.attached.optimizers) > 1 else next(iter(rules.values()), None)
    facts["groups"] = _groups(look, taken)
    # The loop clamps these weights, or sets them to an average.
    facts["moved_between_updates"] = sorted({n for _, a, b in in_turn(look.taken) for n in moved(a.after, b.before)})
    # The loop adds noise to these weights for backward alone, or decays them by hand, or forward writes them.
    facts["moved_before_steps"] = sorted({n for step in taken for n in moved(step.called, step.in_forward())})
    left_out = sum(s.dropped for s in seen) + (0 if look.steps.scaler else sum(s.given_up for s in seen))
    if left_out or look.steps.scaler is None:
        facts["backwards_left_out"] = left_out
    facts["updates_before"] = _updates_before(look.taken)
    facts["without_gradient"] = sorted({n for t in taken for n in t.before if n not in t.given})
    facts["cleared_gradients"] = sorted({n for t in taken for n in t.raw if n not in t.given})
    trained = {n for n, p in look.params.items() if p.requires_grad}
    facts["in_no_optimizer"] = sorted(trained - look.attached.owned())
    facts["other_optimizers"] = list(look.attached.strangers)
    facts["frozen"] = sorted(n for n, p in look.params.items() if not p.requires_grad)
    between = {n for a, b in pairwise(seen) for n in moved(a.weights, b.weights)}
    facts["frozen_moved"] = sorted(between.intersection(facts["frozen"]) - look.attached.owned())
    facts["statistics_of_frozen"] = sorted({name for s in seen for name in _moving(look.network, s)})
    facts["tied"] = _tied(look.network)
    return facts


def _known(values: Sequence[Any]) -> Any:
    """Returns a fact of all sums, of which there may be none."""
    return one(values) if values else NOT_SEEN


def _inputs(seen: Sum) -> Iterator[Tensor]:
    """Yields the tensors of real numbers that the network is given, without tensors that depend on its parameters."""
    for event, call in zip(seen.calls, seen.record.calls.get(OUTPUT, ()), strict=False):
        yield from (v for at, v in enumerate(call.inputs) if is_real(v) and at not in event.given)


def _master(step: Taken, name: str) -> str:
    """Returns the dtype of a weight, or the dtype of a wider copy of it that the optimizer remembers."""
    w = step.after.get(name)
    if w is not None and bool(w.any()):
        for kept in step.state_after.get(name, {}).values():
            wider = isinstance(kept, Tensor) and kept.shape == w.shape and kept.itemsize > w.itemsize
            if wider and torch.equal(kept.to(w.dtype), w):
                return dtype_name(kept.dtype)
    return step.dtypes[name]


def _moments(taken: Sequence[Taken]) -> dict[str, str]:
    kinds: dict[str, set[str]] = {}
    for step in taken:
        for state in step.state_after.values():
            for kind, value in state.items():
                if getattr(value, "ndim", 0):
                    kinds.setdefault(kind, set()).add(dtype_name(value.dtype))
    return {kind: "+".join(sorted(found)) for kind, found in sorted(kinds.items())}


def _sums_of(seen: Sequence[Sum], sums: Mapping[Sum, Replayed]) -> dict[str, Any]:
    """Returns the micro-batches of the sums: their number, the loss, and how much each micro-batch counts."""
    facts: dict[str, Any] = {"micro_batches": _known([len(s.roots) for s in seen])}
    weights, labels, losses = [], [], []
    for each, replay in ((s, sums[s]) for s in seen if s in sums):
        scale = next(iter(each.scales), 1.0)  # 1 where no scaler multiplied a loss
        weights.append([rounded(share / scale) for _, share in replay.shares])
        labels.append([op.labels for op, _ in replay.shares if isinstance(op, Op)])
        losses += [_loss(op) for op, _ in replay.shares]
    if losses:
        facts["loss"] = one(sorted(set(losses)))
        facts["micro_batch_weights"] = one(weights)
        facts["micro_batch_labels"] = one(labels)
    elif any(replay.layers is not None and not replay.why for replay in sums.values()):
        facts["loss"] = "not known: the loop calls no loss function of torch, so how much each counts is not known"
    return facts


def _loss_in_16_bits(seen: Sum) -> Iterator[str]:
    """Yields the parts of a loss that are computed in 16 bits. A loop may mean that, as autocast on a CPU does."""
    for op in seen.ops:
        if (op.name in SOFTMAX and op.dtypes[0] in HALF) or (op.labels is not None and op.within):
            yield f"{_loss(op)} ({op.line})"


def _constant_terms(seen: Sum) -> Iterator[str]:
    """Yields the lines that add a tensor other than 0 to a loss, though it requires no gradient."""
    for op in _parts(seen):
        if op.name in SUMS and op.scalar:
            terms = [leaf for leaf in op.leaves if isinstance(leaf, Tensor) and leaf.numel() == 1]
            yield from (op.line for term in terms if bool(term != 0))


def _parts(seen: Sum) -> Iterator[Op]:
    """Yields the functions whose results are the terms of the loss, a weighted sum. Functions in the denominator of a
    Dice loss are not among them."""
    wanted = {slot for root in seen.roots for slot in root.slots}
    for op in reversed(seen.ops):
        if not wanted.isdisjoint(filter(None, op.results)):
            yield op
            slots = set(op.needs())
            wanted |= slots if op.name in SUMS or (op.name in WEIGHS and len(slots) == 1) else set()


def _loss(op: Op | None) -> str:
    """Returns what a loss is, in words; None is one that the network takes itself."""
    if op is None:
        return "the network's own"
    dtype, within = op.dtypes[0], [f"{name.strip('_')} in {dtype_name(d)}" for name, d in sorted(op.within.items())]
    parts = f", its {', '.join(within)}" if within else ""
    return f"{op.name} in {dtype_name(dtype)}{parts}" if dtype else op.name


def _updates_before(taken: Sequence[Taken]) -> Any:
    """Returns how many updates each optimizer had counted before its first step. An optimizer that does not count is
    left out; None if none of them counts."""
    first: dict[str, Taken] = {}
    for step in taken:
        if step.state_after and not step.skipped:
            first.setdefault(step.optimizer, step)
    counts = [
        max((int(s.get("step", 0)) for s in step.state.values()), default=0)
        for step in first.values()
        if any("step" in s for s in step.state_after.values())
    ]
    return one(counts)


def _moving(network: nn.Module, seen: Sum) -> Iterator[str]:
    """Yields frozen norms that are in training mode, so that their running statistics move."""
    if seen.first is None:
        return
    for name, module in network.named_modules():
        own = {each for each, _ in module.named_parameters(prefix=name)}
        trains = seen.first.attributes.get(name, {}).get("training")
        frozen = bool(own) and not own & seen.first.trained
        if isinstance(module, BATCH_NORMS) and module.track_running_stats and trains and frozen:
            yield name or "the network"


def _tied(network: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, p in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return sorted(sorted(each) for each in names.values() if len(each) > 1)


def _scaling(look: Look) -> dict[str, Any]:
    if look.steps.scaler is None:
        return {"loss_scale": None}
    policy = look.steps.policy
    said = "its own policy"
    if isinstance(policy, DynamicLossScale):
        said = f"times {policy.growth_factor:g} every {policy.growth_interval}, times {policy.backoff_factor:g} back"
    if any(t.scaled and not t.skipped and not t.by_scaler for t in look.taken):
        said += ", and the loop itself takes the steps: the scaler skips none"
    return {"loss_scale": said, "scales": [t.scale for t in look.taken]}


def _groups(look: Look, taken: Sequence[Taken]) -> list[dict[str, Any]]:
    """Returns the parameter groups of each optimizer, with their settings over its steps."""
    names: dict[tuple[str, int], set[str]] = {}
    settings: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}  # by group and by step
    for number, step in enumerate(taken):
        groups: dict[int, int] = {}
        for name, shared in step.settings.items():
            key = step.optimizer, groups.setdefault(id(shared), len(groups))
            names.setdefault(key, set()).add(name)
            settings.setdefault(key, {})[number] = shared
    return [
        {"parameters": len(names[key]), **_settings(look.attached.optimizers[key[0]], list(steps.values()))}
        for key, steps in settings.items()
    ]


def _settings(optimizer: torch.optim.Optimizer, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the usual settings of a group over its steps, and the others that its class would not choose."""
    taken = inspect.signature(type(optimizer)).parameters  # a schedule may add notes of its own to the groups
    found: dict[str, Any] = {}
    for kind in dict.fromkeys((*USUAL, *(kind for kind in taken if kind not in HOW))):
        values = [tree_map(_plain, each[kind]) for each in steps if kind in each]
        is_meant = kind in USUAL or any(v != tree_map(_plain, taken[kind].default) for v in values)
        # Some optimizers find their own rate.
        if is_meant and (kind == "lr" or any(v is not None for v in values)):
            found[kind] = one(values)
    return found


def _plain(setting: Any) -> Any:
    """Returns a number as Python has it, a word or a switch as it is, and the name of anything else."""
    if isinstance(setting, (bool, str, NoneType)):
        return setting
    is_one = isinstance(setting, (int, float)) or (isinstance(setting, Tensor) and setting.numel() == 1)
    return float(setting) if is_one else type(setting).__name__
