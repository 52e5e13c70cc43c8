"""The exact gradients of a watched sum: the loop's own computation in float64, from the inputs of the network on."""

import torch
from torch import Tensor

from mpcompare.verdict.examine.forced.random_numbers import Fed
from mpcompare.verdict.examine.forced.record import OUTPUT
from mpcompare.verdict.examine.forced.replay import default_dtype
from mpcompare.verdict.examine.forced.weights import Weights
from mpcompare.watching.looking import Look
from mpcompare.watching.replaying import FromTheRoot, as_it_was, no_loss, without_autocast
from mpcompare.watching.steps import Sum


def exact_gradients(look: Look, seen: Sum, at: Sum) -> dict[str, Tensor]:
    """Returns the gradients of a sum in float64. Nothing of its record is passed on but the inputs of the network, and
    the random numbers that it drew.

    Args:
        at: the sum with the weights and buffers at which they are taken.
    """
    if seen.first is None or at.first is None:
        return {}
    network = as_it_was(look.network, seen, at).double()
    replay = FromTheRoot(network, torch.float64, seen.record, no_loss, [], 1.0, lambda *_: None)
    replay.events, replay.weights = tuple(seen.tape), Weights(network, torch.float64)
    kept = torch.random.fork_rng(devices=[]), torch.enable_grad(), without_autocast()
    with kept[0], kept[1], kept[2], replay.weights, Fed(seen.record.drawn), default_dtype(torch.float64):
        replay.take(seen.record.calls[OUTPUT])
    found: dict[str, Tensor] = {}
    for name, p in network.named_parameters():
        parts = [t.grad for t in (p, replay.weights.between.get(name)) if t is not None and t.grad is not None]
        if parts:
            found[name] = sum(parts[1:], parts[0])
    return found
