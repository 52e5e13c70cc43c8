"""Networks that others wrote, as small as they can be made from their own arguments, with random weights.

Networks of torchvision, timm and transformers come with these libraries. The last two libraries are the extra
``networks``; a network whose library is missing says so when it is made. All networks are in their usual form but for
their size, and without dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpcompare.tasks.data import Dataset
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task

ROWS, STEPS, VOCABULARY = 8, 6, 64
BOTH, BF16 = ("bf16", "fp16"), ("bf16",)


@dataclass(frozen=True)
class Network:
    """A network of others.

    Attributes:
        name, library: the network's name as its library has it, and the library.
        make: makes it, with random weights; raises ImportError where its library is missing.
        data: makes its data, of so many samples.
        precisions: the 16-bit precisions in which it is compared; fp16 is left out where torch's CPU has no kernel, or
            a slow one.
        lr: the learning rate of SGD with momentum 0.9.
    """

    name: str
    library: str
    make: Callable[[], nn.Module]
    data: Callable[[int], Dataset]
    precisions: tuple[str, ...] = BOTH
    lr: float = 0.05

    @property
    def task(self) -> Task:
        return Task(self.make, "cross_entropy", Sgd(self.lr, 0.9), ROWS)

    @property
    def dataset(self) -> Dataset:
        return self.data(ROWS * STEPS)


def images(side: int, channels: int, samples: int) -> Dataset:
    """Returns handwritten digits as images of that size, in classes 0 to 9."""
    plain = digits(0, samples)

    def resized(x: Tensor) -> Tensor:
        x = nn.functional.interpolate(x.view(-1, 1, 28, 28), (side, side), mode="bilinear", antialias=True)
        return x.expand(-1, channels, -1, -1).contiguous()

    few = slice(0, 16)
    return Dataset("digits", "asked for", resized(plain.x_train), plain.y_train, resized(plain.x_test[few]),
                   plain.y_test[few])  # fmt: skip


def maps(samples: int) -> Dataset:
    """Returns digits of 32 x 32 and, of each pixel, whether it is bright."""
    plain = images(32, 1, samples)
    bright = [(x[:, 0] > 0.5).long() for x in (plain.x_train, plain.x_test)]
    return Dataset("digits", "asked for", plain.x_train, bright[0], plain.x_test, bright[1])


def vectors(samples: int) -> Dataset:
    """Returns digits as vectors ``[784]``."""
    plain = digits(0, samples)
    return Dataset(
        "digits", "asked for", plain.x_train.flatten(1), plain.y_train, plain.x_test[:16].flatten(1), plain.y_test[:16]
    )


def ids(samples: int, length: int = 24) -> Dataset:
    """Returns ids ``[samples, length]``, and the next ids. Mostly an id is five times the id before it plus 1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(VOCABULARY, (samples, length), generator=generator)
    noise *= torch.rand(samples, length, generator=generator) < 0.2
    found = [torch.randint(VOCABULARY, (samples,), generator=generator)]
    for extra in noise.T:
        found.append((5 * found[-1] + 1 + extra) % VOCABULARY)
    together = torch.stack(found, dim=1)
    x, y = together[:, :-1], together[:, 1:]
    return Dataset("ids", "asked for", x, y, x[:16], y[:16])


def lines(samples: int) -> Dataset:
    """Returns ids, and as the class of a line its first id modulo 4."""
    plain = ids(samples)
    return Dataset("ids", "asked for", plain.x_train, plain.x_train[:, 0] % 4, plain.x_test, plain.x_test[:, 0] % 4)


class Logits(nn.Module):
    """A network of transformers, whose output is an object, as one that returns its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits


def of_torchvision(name: str, **options: Any) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)(weights=None, **options)


def of_timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, **options)


def of_transformers(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    no_dropout = dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob",
         "attention_dropout", "dropout_rate", "embedding_dropout", "mlp_dropout"), 0.0,
    )  # fmt: skip
    known = getattr(transformers, config)()
    no_dropout = {key: value for key, value in no_dropout.items() if hasattr(known, key)}
    return Logits(getattr(transformers, model)(getattr(transformers, config)(**no_dropout, **options)))


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=2, embed_dim=48)


LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "num_labels": 4,
}  # fmt: skip


class Encoder(nn.Module):
    """torch's own transformer: an embedding, ``nn.TransformerEncoder`` with a causal mask, a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.encoder(self.embedding(x), mask=self.mask, is_causal=True))


class BidirectionalGru(nn.Module):
    """An embedding, a GRU in both directions, the mean of its states, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.gru = nn.GRU(24, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.output = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.gru(self.embedding(x))[0].mean(dim=1))


def double(inputs: int, outputs: int) -> nn.Sequential:
    pieces: list[nn.Module] = []
    for channels in (inputs, outputs):
        pieces += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
    return nn.Sequential(*pieces)


class UNet(nn.Module):
    """The U-Net of Ronneberger et al. (arXiv 1505.04597) in its usual form of today: batch norms, padded convolutions,
    transposed ones on the way up. Two classes of each pixel, which stand last."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([double(1, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList([nn.ConvTranspose2d(n * width, n * width // 2, 2, stride=2) for n in (4, 2)])
        self.joined = nn.ModuleList([double(4 * width, 2 * width), double(2 * width, width)])
        self.output = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.down):
            x = block(self.pool(x) if number else x)
            kept.append(x)
        for up, joined, across in zip(self.up, self.joined, (kept[1], kept[0]), strict=True):
            x = joined(torch.cat([across, up(x)], dim=1))
        return self.output(x).movedim(1, -1)


def normed_weights() -> nn.Module:
    """Returns an MLP with a weight norm on one layer and spectral norms on two."""
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    return nn.Sequential(
        weight_norm(nn.Linear(784, 48)), nn.GELU(), spectral_norm(nn.Linear(48, 32)), nn.GELU(),
        spectral_norm(nn.Linear(32, 10)),
    )  # fmt: skip


RESNET18 = partial(of_timm, "resnet18", channels=(8, 16, 32, 48), num_classes=10)


def frozen_body() -> nn.Module:
    """Returns a resnet18. Only its last block and its head are trained."""
    network = RESNET18()
    for name, p in network.named_parameters():
        p.requires_grad = name.startswith(("layer4.1", "fc"))
    return network


vision = partial(images, 32, 3)
NETWORKS = (
    Network(
        "mobilenet_v3_small", "torchvision",
        partial(of_torchvision, "mobilenet_v3_small", num_classes=10, dropout=0.0, width_mult=0.25), vision, BF16,
    ),
    Network(
        "shufflenet_v2_x0_5", "torchvision", partial(of_torchvision, "shufflenet_v2_x0_5", num_classes=10), vision, BF16
    ),
    Network("resnet18", "timm", RESNET18, vision, BF16),
    Network("resnet18, frozen body", "timm", frozen_body, vision, BF16),
    Network(
        "swin_tiny", "timm",
        partial(
            of_timm, "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2),
            num_heads=(1, 2), num_classes=10, drop_path_rate=0.0,
        ), vision,
    ),
    Network(
        "vit_tiny", "timm",
        partial(
            of_timm, "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3,
            num_classes=10,
        ), vision,
    ),
    Network(
        "convnext", "timm",
        partial(of_timm, "convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 32, 48), num_classes=10), vision, BF16,
    ),
    Network(
        "mixer", "timm",
        mixer, vision,
    ),
    Network(
        "gpt2, tied", "transformers",
        partial(
            of_transformers, "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2,
            n_positions=64, use_cache=False,
        ), ids,
    ),
    Network("llama", "transformers", partial(of_transformers, "LlamaForCausalLM", "LlamaConfig", **LLAMA), ids),
    Network(
        "bert", "transformers", partial(of_transformers, "BertForSequenceClassification", "BertConfig", **BERT), lines
    ),
    Network(
        "mixtral", "transformers",
        partial(
            of_transformers, "MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4,
            num_experts_per_tok=2, experts_implementation="eager",
        ), ids,
    ),
    Network(
        "qwen3", "transformers",
        partial(of_transformers, "Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=16), ids,
    ),
    Network(
        "gemma", "transformers",
        partial(of_transformers, "GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=16), ids,
    ),
    Network("nn.TransformerEncoder", "torch", Encoder, ids),
    Network("nn.GRU, bidirectional", "torch", BidirectionalGru, lines, BF16),
    Network("U-Net", "torch", UNet, maps, BF16),
    Network("weight_norm, spectral_norm", "torch", normed_weights, vectors),
)  # fmt: skip
