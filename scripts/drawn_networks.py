"""Networks of torchvision, timm and transformers as these libraries make them, small, with data and a loss to train.

A network is made by the library's own maker from its usual configuration, whose sizes are limited by one rule for all
(``LARGEST``). Nothing is wrapped, and dropout stays as it is. A configuration names ``make`` and ``load``:
``task.model._target_=drawn_networks.make``.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, CLASSES, LABELS, LENGTH = 64, 10, 4, 16
# The largest size of an argument, by the first pattern that its name holds. Sizes of a list are limited one by one.
LARGEST = (
    ("vocab", VOCABULARY), ("position|seq_len|n_ctx", 64), ("image_size|img_size", 32), ("patch_size", 8),
    ("head_dim|head_size|d_kv", 16), ("heads|n_head", 2), ("per_tok|top_k", 2),
    ("experts", 4), ("layer|depth|block", 2), ("intermediate|ffn|d_ff|mlp_dim", 64),
    ("hidden|d_model|dim|embd|embed|channels|rank", 32),
)  # fmt: skip
TASKS = ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "ImageClassification")
Batch = Any


def limited(name: str, value: Any) -> Any:
    """Returns an argument of a network, made small."""
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return type(value)(limited(name, each) for each in value)
    if type(value) is not int:
        return value
    return min(value, next((most for pattern, most in LARGEST if re.search(pattern, name)), value))


@contextmanager
def limited_arguments(of: type[nn.Module]) -> Iterator[None]:
    """Gives small arguments to each network of this class that is made in the block."""
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

    of.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        of.__init__ = original  # type: ignore[method-assign]


def names_of(library: str, tasks: Iterable[str] = TASKS) -> set[str]:
    """Returns the names of a library's networks for images, or, of transformers, for these tasks."""
    if library == "torchvision":
        from torchvision import models

        return set(models.list_models(module=models))
    if library == "timm":
        import timm

        return set(timm.list_models())
    import transformers

    return {each for each in dir(transformers) if each.endswith(tuple(f"For{task}" for task in tasks))}


def entry(library: str, name: str) -> Callable[[], nn.Module]:
    """Returns the library's own maker of a network for images, in 10 classes."""
    if library == "torchvision":
        import torchvision

        return partial(torchvision.models.get_model, name, weights=None, num_classes=CLASSES)
    import timm

    return partial(timm.create_model, name, pretrained=False, num_classes=CLASSES)


def class_of(library: str, name: str) -> Any:
    if library == "transformers":
        import transformers

        return getattr(transformers, name)
    with torch.device("meta"):
        return type(entry(library, name)())


def make(library: str, name: str) -> nn.Module:
    """Returns a network with small arguments and random weights."""
    of = class_of(library, name)
    if library != "transformers":
        with limited_arguments(of):
            return entry(library, name)()
    usual = of.config_class()
    sizes = {key: limited(key, value) for key, value in usual.to_dict().items() if limited(key, value) != value}
    config = of.config_class(**sizes)
    config.use_cache, config.num_labels = False, CLASSES if "Image" in name else LABELS
    pad = getattr(config, "pad_token_id", None) or 0
    config.pad_token_id = pad if pad < VOCABULARY else 0
    network: nn.Module = of(config)
    return network


def load(seed: int, library: str, name: str, side: int = 32, samples: int = 48) -> tuple[Batch, Batch, Batch, Batch]:
    """Returns training and held-out samples: images of ``side`` x ``side`` and their classes; for transformers a dict
    of the network's arguments, its labels among them."""
    of = torch.Generator().manual_seed(seed)
    x, y = _batch(library, name, side, samples + 16, of)
    train, test = slice(0, samples), slice(samples, None)
    return _rows(x, train), _rows(y, train), _rows(x, test), _rows(y, test)


def _rows(batch: Batch, part: slice) -> Batch:
    return {key: each[part] for key, each in batch.items()} if isinstance(batch, dict) else batch[part]


def _batch(library: str, name: str, side: int, samples: int, of: torch.Generator) -> tuple[Batch, Batch]:
    if library != "transformers":
        return _images(side, samples, of)
    if name.endswith("ImageClassification"):
        x, labels = _images(side, samples, of)
        batch = {"pixel_values": x, "labels": labels}
    else:
        batch = _text(name, samples, of)
    return batch, batch


def _images(side: int, samples: int, of: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns noise ``[n, 3, side, side]`` with a bright stripe whose place tells the image's class ``[n]``."""
    y = torch.randint(CLASSES, (samples,), generator=of)
    x = torch.randn(samples, 3, side, side, generator=of)
    stripes = torch.arange(side) * CLASSES // side
    return x + 2 * (stripes == y[:, None]).float()[:, None, None], y


def _text(name: str, samples: int, of: torch.Generator) -> dict[str, Tensor]:
    """Returns ids ``[n, 16]``. Mostly an id is five times the id before it plus 1. Some rows end in padding."""
    found = [torch.randint(1, VOCABULARY, (samples,), generator=of)]
    for _ in range(LENGTH - 1):
        found.append(1 + (5 * found[-1] + torch.randint(3, (samples,), generator=of)) % (VOCABULARY - 1))
    ids = torch.stack(found, dim=1)
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (samples, 1), generator=of)
    labels = {"SequenceClassification": ids[:, 0] % LABELS, "TokenClassification": (ids % LABELS)}
    wanted = next((each for task, each in labels.items() if name.endswith(task)), ids)
    labels_of_text = wanted if wanted.dim() == 1 else wanted.masked_fill(~mask, -100)
    batch = {"input_ids": ids.masked_fill(~mask, 0), "labels": labels_of_text}
    takes = inspect.signature(class_of("transformers", name).forward).parameters
    return {**batch, "attention_mask": mask.long()} if "attention_mask" in takes else batch
