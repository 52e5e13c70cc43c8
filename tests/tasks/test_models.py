"""The modules of the tasks have the right shapes, and each learns."""

from itertools import islice

import pytest
import torch
import torch.nn.functional as F

from mpcompare.errors import InputError
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.data.generated import digits, synthetic_images
from mpcompare.tasks.data.text import topics
from mpcompare.tasks.images import CifarCnn, MnistCnn
from mpcompare.tasks.text import CharGpt, CharLstm, SentimentLstm


def reviews(seed):
    """Returns reviews of the layout of imdb's, in which three words praise and three others blame."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (960,), generator=generator)
    x = torch.randint(2, 50, (960, 24), generator=generator)
    said = torch.rand(x.shape, generator=generator) < 0.3
    x = torch.where(said, 50 + 3 * y[:, None] + torch.randint(3, x.shape, generator=generator), x)
    lengths = torch.randint(6, 25, (960, 1), generator=generator)
    x = torch.where(torch.arange(24) < lengths, x, 0)
    return Dataset("reviews", "for a test", x, y, x, y)


# name: model, data, lr, how much of the first loss may be left after 30 steps of 32 samples
TASKS = {
    "MnistCnn": (lambda: MnistCnn(8), lambda: digits(0, 960), 0.01, 0.5),
    "CharLstm": (lambda: CharLstm(96, 64), lambda: topics(0, 32), 1.0, 0.75),
    "CharGpt": (lambda: CharGpt(96, 32, 64, 2), lambda: topics(0, 32), 0.1, 0.75),
    "SentimentLstm": (lambda: SentimentLstm(56, 16), lambda: reviews(0), 0.5, 0.5),
    "CifarCnn": (lambda: CifarCnn(8), lambda: synthetic_images(0, 960), 0.02, 0.7),
    "CharLstm, 2 layers": (lambda: CharLstm(96, 64, 2), lambda: topics(0, 32), 1.0, 0.75),
    "CharGpt, tied": (lambda: CharGpt(96, 32, 64, 2, tied=True), lambda: topics(0, 32), 0.1, 0.75),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_each_model_learns_its_data(name):
    make, load, lr, left = TASKS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for x, y in islice(batches(load(), 32), 30):
        output = model(x)
        assert output.shape[:-1] == y.shape
        loss = F.cross_entropy(output.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) / 3 < left * losses[0]


def test_output_shapes():
    ids = torch.randint(96, (5, 12))
    assert MnistCnn()(torch.randn(5, 1, 28, 28)).shape == (5, 10)
    assert CifarCnn()(torch.randn(5, 3, 32, 32)).shape == (5, 10)
    assert CharLstm(96)(ids).shape == CharGpt(96, 16)(ids).shape == (5, 12, 96)
    assert SentimentLstm(96)(ids).shape == (5, 2)


def test_padding_changes_no_sentiment():
    model = SentimentLstm(50, 8)
    ids = torch.randint(2, 50, (3, 7))
    torch.testing.assert_close(model(ids), model(F.pad(ids, (0, 9))))
    assert model(torch.zeros(2, 5, dtype=torch.int64)).isfinite().all()  # a review without a word


@pytest.mark.parametrize("make", [lambda: CharLstm(96, 32), lambda: CharGpt(96, 12, 32)], ids=["lstm", "gpt"])
def test_no_character_is_predicted_from_later_ones(make):
    model, ids = make(), torch.randint(96, (2, 12))
    changed = ids.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 96
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert (before[:, 8:] != after[:, 8:]).any(2).all()


def test_names_say_where_a_parameter_is():
    names = [name for name, _ in CharGpt(96, 16).named_parameters()]
    assert names[:4] == ["embedding.weight", "positions.weight", "blocks.0.norm1.weight", "blocks.0.norm1.bias"]
    assert {"blocks.2.attention.qkv.weight", "blocks.2.down.bias", "output.weight"} <= set(names)
    assert "stage2.conv1.weight" in dict(CifarCnn().named_parameters())


def test_tied_weights_are_one_parameter():
    model, apart = CharGpt(96, 16, tied=True), CharGpt(96, 16)
    names, all_names = ([name for name, _ in m.named_parameters()] for m in (model, apart))
    assert [name for name in all_names if name not in names] == ["output.weight"]
    assert model.embedding.weight is model.output.weight


def test_heads_that_do_not_divide_the_width_are_one_line():
    with pytest.raises(InputError, match="task.model.width=10: expected a multiple of task.model.heads=4"):
        CharGpt(96, 16, width=10)
