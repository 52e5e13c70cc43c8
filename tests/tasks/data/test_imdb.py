import pytest
import torch

from mpcompare.errors import InputError
from mpcompare.tasks.data.imdb import imdb

REVIEWS = {
    "train/neg/0_2.txt": "Bad, BAD film!<br /><br />The end isn't near.",
    "train/neg/1_1.txt": "the the zzz",
    "train/pos/0_9.txt": "Good film.",
    "train/pos/1_10.txt": "The good and the good",
    "test/neg/0_3.txt": "the bad dog",
    "test/pos/0_8.txt": "...",
}


@pytest.fixture
def root(tmp_path):
    for name, text in REVIEWS.items():
        path = tmp_path / "aclImdb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def rows(x, y):
    return sorted((label, row) for label, row in zip(y.tolist(), x.tolist(), strict=True))


def test_words_get_ids_by_their_frequency_in_the_training_part(root):
    dataset = imdb(0, str(root), length=4, vocabulary=6)
    # the: 5, good: 3, then bad and film (2 each, by the alphabet); 1 is any other word, 0 follows a short review
    the, good, bad, film = 2, 3, 4, 5
    assert rows(dataset.x_train, dataset.y_train) == [
        (0, [the, the, 1, 0]), (0, [bad, bad, film, the]), (1, [the, good, 1, the]), (1, [good, film, 0, 0]),
    ]  # fmt: skip
    assert rows(dataset.x_test, dataset.y_test) == [(0, [the, bad, 1, 0]), (1, [0, 0, 0, 0])]
    assert dataset.x_train.dtype == dataset.y_train.dtype == torch.int64
    assert (dataset.name, dataset.reason) == ("imdb", f"found in {root}")


def test_the_seed_shuffles_and_samples_draws_some(root):
    orders = {tuple(imdb(seed, str(root)).y_train.tolist()) for seed in range(8)}
    assert len(orders) > 1
    assert imdb(3, str(root)).fingerprint == imdb(3, str(root)).fingerprint
    few = imdb(0, str(root), samples=2)
    assert (len(few.x_train), len(few.x_test)) == (2, 2)


def test_a_missing_folder_says_where_to_get_it_and_what_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MPCOMPARE_DATA", str(tmp_path))
    with pytest.raises(InputError) as error:
        imdb(0)
    line = str(error.value)
    assert line.startswith(f"data.root={tmp_path}: holds no aclImdb/train/neg; get https://ai.stanford.edu/~amaas/")
    assert line.endswith("data.root=FOLDER")


def test_the_folder_itself_may_be_named(root):
    above, itself = imdb(0, str(root)), imdb(0, str(root / "aclImdb"))
    assert itself.fingerprint == above.fingerprint


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: (d / "train/pos/0_9.txt").write_bytes(b"caf\xe9"), "cannot read .*0_9.txt: 'utf-8' codec"),
        (lambda d: (d / "test/pos/0_8.txt").unlink(), r"aclImdb/test/pos holds no review \(\*.txt\)"),
        (lambda d: (d / "test/neg").rename(d / "elsewhere"), "holds no aclImdb/test/neg"),
    ],
    ids=["not utf-8", "empty", "part missing"],
)
def test_broken_folders_are_one_line(root, break_it, message):
    break_it(root / "aclImdb")
    with pytest.raises(InputError, match=f"data.root=.*{message}"):
        imdb(0, str(root))


def test_arguments_that_make_no_sense_are_named(root):
    for arguments in ({"length": 0}, {"vocabulary": 2}, {"samples": 0}):
        ((name, value),) = arguments.items()
        with pytest.raises(InputError, match=f"data.{name}={value}: expected a whole number"):
            imdb(0, str(root), **arguments)
