"""Networks as people write them: several inputs, several outputs, a loss of their own or one that they return."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.given import dataset_of
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task

BATCH, SAMPLES = 16, 128


class TwoInputs(nn.Module):
    """A tuple of numbers and ids; some ids are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.words, self.output = nn.Linear(12, 16), nn.Embedding(20, 16), nn.Linear(16, 5)

    def forward(self, numbers: Tensor, words: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.words(words)
        h = h.mean(1) if mask is None else (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.output(torch.tanh(self.numbers(numbers) + h))


class Vae(nn.Module):
    """An autoencoder that draws its code in fp32, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 16), nn.Linear(4, 12)
        self.mu, self.logvar = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.encoder(x))
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(mu + torch.exp(0.5 * logvar) * 0.5), mu, logvar


def vae_loss(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    recon, mu, logvar = (each.float() for each in output)
    kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).mean()
    return nn.functional.mse_loss(recon, x) + 0.1 * kl


class HalvesGradients(Amp):
    """Its gradients are half as large as they should be."""

    def unscale(self) -> None:
        super().unscale()
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


def given(x: Any, y: Any) -> Dataset:
    """Returns a data set whose last rows are held out."""

    def rows(values: Any, part: slice) -> Any:
        if isinstance(values, dict):
            return {name: value[part] for name, value in values.items()}
        return tuple(value[part] for value in values) if isinstance(values, tuple) else values[part]

    train, test = slice(0, SAMPLES - BATCH), slice(SAMPLES - BATCH, None)
    return dataset_of((rows(x, train), rows(y, train), rows(x, test), rows(y, test)), "given")


def _two_inputs(kind: type) -> tuple[Task, Dataset]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(SAMPLES, 12, generator=generator)
    words = torch.randint(20, (SAMPLES, 6), generator=generator)
    y = numbers[:, :5].argmax(1)
    mask = torch.arange(6) < torch.randint(1, 7, (SAMPLES, 1), generator=generator)
    x: Any = (numbers, words) if kind is tuple else {"words": words, "numbers": numbers, "mask": mask}
    return Task(TwoInputs, "cross_entropy", Sgd(0.1, 0.9), BATCH), given(x, y)


def _vae() -> tuple[Task, Dataset]:
    x = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(0))
    return Task(Vae, vae_loss, Sgd(0.1, 0.9), BATCH), given(x, x)


def _bert() -> tuple[Task, Dataset]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                        max_position_embeddings=16, num_labels=3)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (SAMPLES, 8), generator=generator)
    mask = (torch.arange(8) < torch.randint(3, 9, (SAMPLES, 1), generator=generator)).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 3}
    return Task(partial(BertForSequenceClassification, config), "model", Sgd(0.1, 0.9), BATCH), given(batch, batch)


def _gpt2() -> tuple[Task, Dataset]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    ids = torch.randint(1, 40, (SAMPLES, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(8) < (ids[:, :1] % 5), -100)
    batch = {"input_ids": ids, "labels": labels}
    return Task(partial(GPT2LMHeadModel, config), "model", Sgd(0.1, 0.9), BATCH), given(batch, batch)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.output = nn.Embedding(20, 16), nn.Linear(16, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = self.words(ids) * mask[..., None]
        return {"tags": self.output(torch.tanh(h + h.mean(1, keepdim=True)))}


class OfTags:
    """The mean over the labels that are not -100. Each micro-batch has another number of such labels."""

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        tags = output["tags"].float().flatten(0, 1)
        total = nn.functional.cross_entropy(tags, batch["tags"].flatten(), ignore_index=-100, reduction="sum")
        return total / self.count(batch).clamp(min=1)

    def count(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["tags"] != -100).sum()


def _tagger() -> tuple[Task, Dataset]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (SAMPLES, 6), generator=generator)
    mask = torch.arange(6) < torch.randint(1, 7, (SAMPLES, 1), generator=generator)
    batch = {"ids": ids, "mask": mask, "tags": (ids % 5).masked_fill(~mask, -100)}
    return Task(Tagger, OfTags(), Sgd(0.1, 0.9), BATCH), given({"ids": ids, "mask": mask}, batch)


TREES = {"tagger": _tagger, "tuple": partial(_two_inputs, tuple), "dict": partial(_two_inputs, dict), "vae": _vae}
HUGGING_FACE = {"bert": _bert, "gpt2": _gpt2}
