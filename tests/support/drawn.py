"""Networks drawn by hash from the names of torchvision, timm and transformers, each made small by one rule.

The names of a library are sorted by the sha256 of a fixed word and the name. A name is taken if its network can be
made small, takes a step on a CPU within seconds, and its class stands in a file of which there is none yet. ``python
tests/power.py draw`` does so, and ``TAKEN`` is what it found.
"""

import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from support.foreign import BOTH, NETWORKS, ROWS, VOCABULARY, Logits, Network, ids, images, lines
from torch import nn

WORD = "forced replay"
WANTED = {"torchvision": 6, "timm": 8, "transformers": 8}
NUMBERS, SECONDS = 3_000_000, 2.0  # of a network that is small enough, and of a step of it
SIDES = (32, 64)  # of an image: the first that a network takes
# The largest size of an argument, by the first pattern that its name holds. Sizes of a list are limited one by one.
LARGEST = (
    ("vocab", VOCABULARY), ("position|seq_len|n_ctx", 64), ("image_size|img_size", 32), ("patch_size", 8),
    ("head_dim|head_size|d_kv", 16), ("heads|n_head", 2), ("per_tok|top_k", 2),
    ("experts", 4), ("layer|depth|block", 2), ("intermediate|ffn|d_ff|mlp_dim", 64),
    ("hidden|d_model|dim|embd|embed|channels|rank", 32),
)  # fmt: skip
TASKS = {
    "CausalLM": ids, "MaskedLM": ids, "SequenceClassification": lines, "ImageClassification": partial(images, 32, 3),
}  # fmt: skip


def limited(name: str, value: Any) -> Any:
    """Returns an argument of a network, made small."""
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return type(value)(limited(name, each) for each in value)
    if type(value) is not int:
        return value
    return min(value, next((most for pattern, most in LARGEST if re.search(pattern, name)), value))


@contextmanager
def limited_arguments(of: type[nn.Module]) -> Iterator[None]:
    """A network of this class is given small arguments while it is entered."""
    original = of.__init__

    def made(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, *args, **kwargs)
        given.apply_defaults()
        for name, value in given.arguments.items():
            if isinstance(value, dict) and name == "kwargs":
                given.arguments[name] = {key: limited(key, each) for key, each in value.items()}
            else:
                given.arguments[name] = limited(name, value)
        original(*given.args, **given.kwargs)

    of.__init__ = made  # type: ignore[assignment]
    try:
        yield
    finally:
        of.__init__ = original  # type: ignore[method-assign]


def entry(library: str, name: str) -> Callable[[], nn.Module]:
    """Returns the library's own maker of a network for images, in 10 classes."""
    if library == "torchvision":
        import torchvision

        return partial(torchvision.models.get_model, name, weights=None, num_classes=10)
    import timm

    return partial(timm.create_model, name, pretrained=False, num_classes=10)


def class_of(library: str, name: str) -> type[nn.Module]:
    if library == "transformers":
        import transformers

        return getattr(transformers, name)
    with torch.device("meta"):
        return type(entry(library, name)())


def small(library: str, name: str) -> nn.Module:
    """Returns a network with small arguments and random weights."""
    of = class_of(library, name)
    if library != "transformers":
        with limited_arguments(of):
            return entry(library, name)()
    usual = of.config_class()
    sizes = {key: limited(key, value) for key, value in usual.to_dict().items() if limited(key, value) != value}
    config = of.config_class(**sizes)
    config.use_cache, config.num_labels = False, 10 if "Image" in name else 4
    pad = getattr(config, "pad_token_id", None) or 0
    config.pad_token_id = pad if pad < VOCABULARY else 0
    return Logits(of(config))


def network(library: str, name: str, side: int = 32) -> Network:
    task = next((task for task in TASKS if name.endswith(task)), "") if library == "transformers" else ""
    data = TASKS[task] if task else partial(images, side, 3)
    return Network(name, library, partial(small, library, name), data, BOTH)


def names_of(library: str) -> list[str]:
    """Returns the names of a library's networks for classes and for text, sorted by their hashes."""
    if library == "torchvision":
        import torchvision

        names = torchvision.models.list_models(module=torchvision.models)
    elif library == "timm":
        import timm

        names = timm.list_models()
    else:
        import transformers

        names = [each for each in dir(transformers) if each.endswith(tuple(f"For{task}" for task in TASKS))]
    return by_hash(set(names))


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
        for name in names_of(library):
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
