"""Backward passes of several losses through one call of the network, ``backward(retain_graph=True)``.

A replay goes back through each call once. So the call is made once more for each further pass, with all that the loop
computed of it for that loss.
"""

from collections.abc import Sequence
from dataclasses import replace

from mpcompare.watching.tape import Called, Event, Op, Root, needed


def one_call_each(tape: Sequence[Event]) -> list[Event]:
    """Returns a tape on which each call of the network has one backward pass."""
    through = {
        id(called): [root for root in tape if isinstance(root, Root) and root.passes & called.passes]
        for called in tape
        if isinstance(called, Called)
    }
    if all(len(roots) < 2 for roots in through.values()):
        return list(tape)
    made: list[Event] = []
    for place, event in enumerate(tape):
        if isinstance(event, Called):
            first = next(iter(through[id(event)]), None)  # None: torch.autograd.grad asked for its gradients
            made.append(event if first is None else replace(event, only=first.passes))
        elif isinstance(event, Root):
            again = [c for c in tape[:place] if isinstance(c, Called) and event in through[id(c)][1:]]
            played = [*again, *_of_calls(again, tape[: place + 1])]
            both = [each for each in tape[:place] if each in played]
            made += [replace(each, only=event.passes) if isinstance(each, Called) else each for each in both]
            made.append(event)
        else:
            made.append(event)
    return made


def _of_calls(calls: Sequence[Called], tape: Sequence[Event]) -> list[Op]:
    """Returns what the root at the end of a tape needs of some calls of the network.

    Raises:
        NotImplementedError: some of it is written into.
    """
    slots = {slot.number for called in calls for slot in called.slots if slot is not None}
    slots |= {inner.slot.number for called in calls for inner in called.inner}
    found = []
    for event in needed([each for each in tape[:-1] if not isinstance(each, Root)] + [tape[-1]]):
        if isinstance(event, Op) and slots.intersection(event.needs()):
            if event.writes is not None:
                raise NotImplementedError(event.line)
            slots |= {slot.number for slot in event.results if slot is not None}
            found.append(event)
    return found
