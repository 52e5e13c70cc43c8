import hashlib
import shutil
import sys
from itertools import islice

import pytest
import torch
from conftest import make_task

from mpcompare.errors import InputError
from mpcompare.tasks import data

MNIST_TASK = make_task(in_features=784, hidden=[16], out_features=10, batch_size=64, samples=4000)


def test_mnist_is_normalised_and_in_order(mnist_root):
    dataset = data.mnist(MNIST_TASK, 0, str(mnist_root))
    assert dataset.x_train.shape == (60000, 784)
    assert dataset.x_test.shape == (10000, 784)
    assert dataset.y_train[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert (dataset.x_train.min(), dataset.x_train.max()) == (-1, 1)
    # Mean pixel of the training images is 33.318 of 255 (a published figure: 0.1307).
    assert dataset.x_train.mean().item() == pytest.approx((0.1307 - 0.5) / 0.5, abs=2e-4)
    assert str(mnist_root) in dataset.reason


def test_auto_takes_mnist_where_it_is_on_disk(mnist_root, caplog):
    caplog.set_level("INFO")
    dataset = data.auto(MNIST_TASK, 0, str(mnist_root), 1)
    assert dataset.name == "mnist"
    assert "using MNIST" in caplog.text


def test_auto_falls_back_to_digits_loudly(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(data, "_download_mnist", lambda root, limit_s: "no internet here")
    dataset = data.auto(MNIST_TASK, 0, str(tmp_path), 1)
    assert dataset.name == "digits"
    assert "NOT MNIST" in caplog.text
    for text in (caplog.text, dataset.reason):
        assert str(tmp_path) in text
        assert "no internet here" in text


def test_mnist_that_cannot_be_had_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_download_mnist", lambda root, limit_s: "no internet here")
    with pytest.raises(InputError, match="data.root=.*cannot be downloaded \\(no internet here\\)"):
        data.mnist(MNIST_TASK, 0, str(tmp_path))


@pytest.mark.parametrize("load", [data.mnist, data.auto])
def test_a_root_that_is_no_folder_is_an_error(tmp_path, load):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data.root=.*file: expected a folder, this is a file"):
        load(MNIST_TASK, 0, str(tmp_path / "file"))
    with pytest.raises(InputError, match="data.root=5: expected the name of a folder"):
        load(MNIST_TASK, 0, 5)


@pytest.mark.parametrize("value", ["", None])
def test_an_empty_environment_variable_is_none(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPCOMPARE_DATA", "") if value == "" else monkeypatch.delenv("MPCOMPARE_DATA", raising=False)
    assert data.data_root() == str(tmp_path / "mpcompare")


def test_download_without_internet_gives_a_reason_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MIRROR", "http://127.0.0.1:9/nothing")  # the discard port: refused at once
    assert "refused" in data._download_mnist(tmp_path, 5)
    assert not list(tmp_path.iterdir())


def test_download_moves_whole_files_into_place(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MIRROR", "data:,ok")
    source = tmp_path / "source"
    source.mkdir()
    for name in data.MNIST_MD5:
        (source / name).write_bytes(name.encode())
    script = f"import shutil, sys; shutil.copytree({str(source)!r}, sys.argv[1] + '/MNIST/raw')"
    monkeypatch.setattr(data, "_DOWNLOAD", script)
    root = tmp_path / "root"
    assert data._download_mnist(root, 60) is None
    assert sorted(p.name for p in (root / "MNIST" / "raw").iterdir()) == sorted(data.MNIST_MD5)
    assert [p.name for p in root.iterdir()] == ["MNIST"]  # nothing left over


@pytest.mark.parametrize(("script", "reason"), [("import time; time.sleep(60)", "not done within 0.5 s"),
                                                ("raise OSError('disk full')", "OSError: disk full")])  # fmt: skip
def test_a_download_that_hangs_or_fails_leaves_nothing(tmp_path, monkeypatch, script, reason):
    monkeypatch.setattr(data, "_MIRROR", "data:,ok")
    monkeypatch.setattr(data, "_DOWNLOAD", script)
    assert data._download_mnist(tmp_path, 0.5 if "sleep" in script else 60) == reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("damage", ["truncated", "another file", "missing"])
def test_damaged_mnist_is_named_and_never_replaced_by_digits(tmp_path, mnist_root, name, damage):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in (mnist_root / "MNIST" / "raw").iterdir():
        (raw / path.name).symlink_to(path)
    (raw / name).unlink()
    if damage == "truncated":
        (raw / name).write_bytes((mnist_root / "MNIST" / "raw" / name).read_bytes()[:5000])
    elif damage == "another file":
        shutil.copy(mnist_root / "MNIST" / "raw" / "t10k-images-idx3-ubyte", raw / name)
    for load in (lambda: data.mnist(MNIST_TASK, 0, str(tmp_path)), lambda: data.auto(MNIST_TASK, 0, str(tmp_path), 1)):
        with pytest.raises(InputError, match=name):
            load()


def test_a_torchvision_that_does_not_match_torch_says_so(mnist_root, monkeypatch):
    class Broken:
        def find_spec(self, fullname, path=None, target=None):
            if fullname.startswith("torchvision"):
                raise RuntimeError("operator torchvision::nms does not exist")

    for module in [m for m in sys.modules if m.startswith("torchvision")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(InputError, match=r"torchvision=.*does not work with torch .*nms does not exist.*pip install"):
        data.mnist(MNIST_TASK, 0, str(mnist_root))


def test_digits_are_seeded_augmented_and_held_out():
    first, again, other = (data.digits(MNIST_TASK, seed) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.x_train.shape == (4000, 784)
    assert first.x_test.shape == (297, 784)
    assert first.x_train.min() >= -1
    assert first.x_train.max() <= 1
    assert torch.equal(first.x_train[:1500], other.x_train[:1500])  # the first round is as it was scanned
    assert torch.equal(first.y_train[1500:3000], first.y_train[:1500])
    change = (first.x_train[1500:3000] - first.x_train[:1500]).abs().mean(dim=1)
    assert (change > 0).all()  # every later one is moved
    assert change.mean() < 0.6  # and still looks like itself: unrelated digits differ by 0.8
    unrelated = (first.x_train[1:1500] - first.x_train[:1499]).abs().mean()
    assert change.mean() < unrelated


def test_digits_are_recognisable_at_28_x_28():
    """Area averages of the upsampled image give back the 8 x 8 scan."""
    from sklearn.datasets import load_digits

    image = data.digits(MNIST_TASK, 0).x_train[:100].reshape(-1, 1, 28, 28) / 2 + 0.5
    small = torch.nn.functional.interpolate(image, (8, 8), mode="area").reshape(100, 64)
    scans = torch.from_numpy(load_digits().data[:100]).float() / 16
    assert torch.corrcoef(torch.stack([small.flatten(), scans.flatten()]))[0, 1] > 0.95


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_synthetic_has_any_shape_and_can_be_learned(loss):
    task = make_task(in_features=12, out_features=4, loss=loss, samples=512)
    dataset = data.synthetic(task, 0)
    dataset.check(task)
    assert dataset.fingerprint == data.synthetic(task, 0).fingerprint != data.synthetic(task, 1).fingerprint
    assert dataset.x_test.shape == (64, 12)
    # A linear fit already explains much of held-out targets that were never seen.
    y = torch.nn.functional.one_hot(dataset.y_train, 4).float() if loss == "cross_entropy" else dataset.y_train
    fit = torch.linalg.lstsq(dataset.x_train, y - y.mean(0)).solution
    guess = dataset.x_test @ fit + y.mean(0)
    if loss == "cross_entropy":
        assert (guess.argmax(1) == dataset.y_test).float().mean() > 0.5  # chance: 0.25
    else:
        assert (guess - dataset.y_test).square().mean() < 0.5 * dataset.y_test.var()


def test_batches_are_whole_in_order_and_repeat():
    task = make_task(samples=10, batch_size=4)
    dataset = data.synthetic(task, 0)
    stream = list(islice(data.batches(dataset, 4), 5))
    starts = [0, 4, 0, 4, 0]
    for (x, y), start in zip(stream, starts, strict=True):
        assert torch.equal(x, dataset.x_train[start : start + 4])
        assert torch.equal(y, dataset.y_train[start : start + 4])
        assert x.untyped_storage().data_ptr() == dataset.x_train.untyped_storage().data_ptr()  # a view: no copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 97}, "task.batch_size=97: data=synthetic has only 96 samples"),
        ({"in_features": 21}, "task.in_features=21: data=synthetic has 20 features"),
        ({"out_features": 2}, "task.out_features=2: data=synthetic has 5 classes"),
        ({"loss": "mse"}, "task.loss=mse: data=synthetic has classes"),
    ],
)
def test_data_that_does_not_fit_the_task_is_named(change, message):
    dataset = data.synthetic(make_task(), 0)
    with pytest.raises(InputError, match=message):
        dataset.check(make_task(**change))


def test_md5_of_the_real_files(mnist_root):
    for name, expected in data.MNIST_MD5.items():
        assert hashlib.md5((mnist_root / "MNIST" / "raw" / name).read_bytes()).hexdigest() == expected
