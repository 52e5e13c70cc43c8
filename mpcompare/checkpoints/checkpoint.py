"""The content of a checkpoint, taken apart into named tensors and plain values, and put together again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mpcompare.errors import InputError, check_whole
from mpcompare.records import finite, numbers
from mpcompare.typed import check_type

OPTIMIZER = "optimizer/"
OWN_GENERATORS = "own_generators"


@dataclass(frozen=True, eq=False)  # tensors have no == that is True or False
class Checkpoint:
    """A point in training."""

    # a backend's ``state_dict()``, as the contract has it: tensors of any shape under ``params``, ``buffers``, each
    # kind of ``optimizer``, and ``generators``, which may be missing; numbers under ``loss_scale``
    state: Mapping[str, Any]
    step: int  # number of steps that were taken, skipped ones included
    updates: int  # number of them that changed the parameters
    position: int  # number of batches that were served, from the first of the data on
    # the task, its data and the backend, as values that JSON has; inf and NaN come back as the strings of
    # :func:`mpcompare.records.finite`, tuples as lists
    what_is_trained: Mapping[str, Any]
    # states of random generators, uint8 ``[bytes]``, by names of the caller's choice
    generators: Mapping[str, Tensor] = field(default_factory=dict)


def take_apart(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors under ``GROUP/NAME``, and the rest, which names the groups and their members in order. Raises
    InputError where the state is none of the contract's: its unknown parts would be lost."""
    state = checkpoint.state
    if {*state, "generators"} != {"params", "buffers", "optimizer", "loss_scale", "generators"}:
        expected = "expected params, buffers, optimizer and loss_scale, and generators where there are any"
        raise InputError("checkpoint of a state", ", ".join(state), expected)
    if kind := next((kind for kind in state["optimizer"] if "/" in kind), None):  # two names could be one path
        raise InputError("checkpoint of a kind of optimizer state", kind, "expected a word without '/'")
    check_type("checkpoint of loss_scale", dict(state["loss_scale"]), dict[str, float])
    members: dict[str, Mapping[str, Tensor]] = {
        "params": state["params"],
        "buffers": state["buffers"],
        **{OPTIMIZER + kind: tensors for kind, tensors in state["optimizer"].items()},
        "generators": checkpoint.generators,
        **({OWN_GENERATORS: state["generators"]} if "generators" in state else {}),
    }
    tensors = {f"{group}/{name}": tensor for group, named in members.items() for name, tensor in named.items()}
    content = {
        "step": checkpoint.step,
        "updates": checkpoint.updates,
        "position": checkpoint.position,
        "loss_scale": dict(state["loss_scale"]),
        "identity": dict(checkpoint.what_is_trained),  # the name that it has in files
        "groups": {group: list(named) for group, named in members.items()},
    }
    return tensors, finite(content)


def put_together(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> Checkpoint:
    """Returns the checkpoint from what :func:`take_apart` returned. Raises KeyError, TypeError, ValueError or
    AttributeError where the two do not belong together or are none of its making."""
    groups: dict[str, list[str]] = content["groups"]
    named = {group: {name: tensors[f"{group}/{name}"] for name in names} for group, names in groups.items()}
    state = {
        "params": named.pop("params"),
        "buffers": named.pop("buffers"),
        "optimizer": {g.removeprefix(OPTIMIZER): named.pop(g) for g in list(named) if g.startswith(OPTIMIZER)},
        "loss_scale": numbers(dict(content["loss_scale"])),
        **({"generators": named.pop(OWN_GENERATORS)} if OWN_GENERATORS in named else {}),
    }
    counts = {name: content[name] for name in ("step", "updates", "position")}
    for name, count in counts.items():
        check_whole(name, count, at_least=0, at_most=2**53)
    check_type("loss_scale", state["loss_scale"], dict[str, float])
    what_is_trained = dict(content["identity"])
    checkpoint = Checkpoint(state, **counts, what_is_trained=what_is_trained, generators=named.pop("generators"))
    if named or len(tensors) != sum(map(len, groups.values())):
        raise ValueError("there are more tensors than it names")
    return checkpoint
