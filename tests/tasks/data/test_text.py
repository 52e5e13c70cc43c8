import sys

import pytest
import torch

from mpcompare.errors import InputError
from mpcompare.tasks.data import text
from mpcompare.tasks.data.text import ALPHABET, encode, topics


def decode(ids):
    return "".join(ALPHABET[i] for i in ids.flatten().tolist())


def test_targets_are_the_next_characters_of_english_text():
    dataset = topics(0)
    assert (dataset.x_train.shape[1], dataset.x_train.dtype) == (64, torch.int64)
    assert len(dataset.x_test) / len(dataset.x_train) == pytest.approx(1 / 9, rel=0.01)
    assert len(dataset.x_train) > 5000
    for x, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert 0 <= x.min() <= x.max() < len(ALPHABET) == 96
    held_out = decode(dataset.x_test)  # in the order of the text, and none of it is trained on
    assert held_out[1:] == decode(dataset.y_test)[:-1]
    assert " the " in held_out


@pytest.mark.slow
def test_windows_are_shuffled_by_the_seed_alone():
    first, again, other = (topics(seed, length=100) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(first.x_test, other.x_test)
    assert sorted(map(tuple, first.x_train.tolist())) == sorted(map(tuple, other.x_train.tolist()))


def test_the_alphabet_has_96_characters_and_others_are_question_marks():
    assert encode("\n ~“é?").tolist() == [0, 1, 95, 32, 32, 32]


def test_what_cannot_be_had_is_one_line(monkeypatch):
    monkeypatch.setattr(text, "_text", lambda: "abc" * 40)
    for arguments, message in [
        ({"length": 100}, "data.length=100: the text has 120 characters, too few for both parts"),
        ({"length": 0}, "data.length=0: expected a whole number"),
        ({"held_out": 1}, "data.held_out=1: expected a finite number above 0 and below 1"),
    ]:
        with pytest.raises(InputError, match=message):
            topics(0, **arguments)


def test_the_longest_prompt_leaves_a_label(monkeypatch):
    monkeypatch.setattr(text, "_text", lambda: "abc" * 400)
    labels = (topics(0, length=4, masked=0.499).y_train >= 0).sum(dim=1)
    assert (labels.min(), labels.max()) == (1, 4)


def test_a_python_without_its_help_pages_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match="data=text: this Python has no pydoc_data"):
        topics(0)
