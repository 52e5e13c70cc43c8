"""Networks drawn by hash from the names of torchvision, timm and transformers, each made small by one rule.

The names of a library are sorted by the sha256 of a fixed word and the name. A name is taken if its network can be
made small, takes a step on a CPU within seconds, and no network of its class's file is taken yet. ``python
tests/power.py draw`` draws them, and ``TAKEN`` is what it found.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from drawn_networks import class_of, make, names_of
from support.foreign import BOTH, NETWORKS, ROWS, Logits, Network, ids, images, lines
from torch import nn

WORD = "forced replay"
WANTED = {"torchvision": 6, "timm": 8, "transformers": 8}
NUMBERS, SECONDS = 3_000_000, 2.0  # the most parameters of a network, and the most seconds of a step
SIDES = (32, 64)  # sides of an image: the first that a network takes
TASKS = {
    "CausalLM": ids, "MaskedLM": ids, "SequenceClassification": lines, "ImageClassification": partial(images, 32, 3),
}  # fmt: skip


def small(library: str, name: str) -> nn.Module:
    """Returns a network with small arguments and random weights."""
    made = make(library, name)
    return Logits(made) if library == "transformers" else made


def network(library: str, name: str, side: int = 32) -> Network:
    task = next((task for task in TASKS if name.endswith(task)), "") if library == "transformers" else ""
    data = TASKS[task] if task else partial(images, side, 3)
    return Network(name, library, partial(small, library, name), data, BOTH)


def by_hash(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(f"{WORD} {name}".encode()).hexdigest())


def file_of(model: nn.Module) -> str:
    """Returns the file in which a network's class stands."""
    return type(model.network if isinstance(model, Logits) else model).__module__


def why_not(found: Network, taken: set[str]) -> str:
    """Returns why a name is not taken; empty where it is."""
    if class_of(found.library, found.name).__module__ in taken:
        return "one of its file is there"
    with torch.device("meta"):
        if (numbers := sum(p.numel() for p in found.make().parameters())) > NUMBERS:
            return f"{numbers} numbers"
    torch.manual_seed(0)
    model = found.make()
    data, loss_fn = found.data(ROWS), found.task.loss_fn
    start = time.monotonic()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(model(data.x_train), data.y_train)
    loss.backward()
    if (seconds := time.monotonic() - start) > SECONDS:
        return f"{seconds:.1f} s"
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    return "" if finite and loss.isfinite() else "not finite"


def draw() -> Iterator[str]:
    """Yields a line for each name, in the order of their hashes, until there are as many networks as are wanted."""
    taken = {file_of(each.make()) for each in NETWORKS}
    for library, wanted in WANTED.items():
        for name in by_hash(names_of(library, TASKS)):
            for side in SIDES:
                try:
                    reason = why_not(network(library, name, side), taken)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
                if not reason:
                    break
            yield f"{library} {name} {side}: {reason or 'taken'}"
            if not reason:
                taken.add(class_of(library, name).__module__)
                wanted -= 1
            if not wanted:
                break


TAKEN = {
    "torchvision": "swin_t densenet161 vit_h_14 squeezenet1_0 mobilenet_v2 mnasnet0_5",
    "timm": "beitv2_large_patch16_224 focalnet_tiny_lrf cait_xxs24_384 vit_small_patch16_rope_mixed_ape_224 nest_small "
    "fastvit_t12 swinv2_cr_huge_384 tinynet_c",
    "transformers": "Exaone4ForCausalLM BioGptForSequenceClassification Dinov2WithRegistersForImageClassification "
    "CanineForSequenceClassification GPTBigCodeForCausalLM RoFormerForMaskedLM Glm4ForSequenceClassification "
    "LukeForMaskedLM",
}  # with torchvision 0.29, timm 1.0.31 and transformers 5.23
DRAWN = tuple(network(library, name) for library, names in TAKEN.items() for name in names.split())
