import shutil
import sys

import pytest

from mpcompare.errors import InputError
from mpcompare.tasks.data.mnist import SOURCE, auto, mnist
from mpcompare.tasks.data.source import Source


def auto_4000(seed, root):
    return auto(seed, 4000, root, 1)


def test_mnist_is_normalised_and_in_order(mnist_root):
    dataset = mnist(0, str(mnist_root))
    assert dataset.x_train.shape == (60000, 1, 28, 28)
    assert dataset.x_test.shape == (10000, 1, 28, 28)
    assert dataset.y_train[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert (dataset.x_train.min(), dataset.x_train.max()) == (-1, 1)
    # Mean pixel of the training images is 33.318 of 255 (a published figure: 0.1307).
    assert dataset.x_train.mean().item() == pytest.approx((0.1307 - 0.5) / 0.5, abs=2e-4)
    assert str(mnist_root) in dataset.reason


@pytest.mark.slow
def test_auto_takes_mnist_where_it_is_on_disk(mnist_root, caplog):
    caplog.set_level("INFO")
    assert auto_4000(0, str(mnist_root)).name == "mnist"
    assert "using MNIST" in caplog.text


def test_auto_falls_back_to_digits_loudly(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Source, "download", lambda *_: "no internet here")
    dataset = auto_4000(0, str(tmp_path))
    assert (dataset.name, len(dataset.x_train)) == ("digits", 4000)
    assert "NOT MNIST" in caplog.text
    for text in (caplog.text, dataset.reason):
        assert str(tmp_path) in text
        assert "no internet here" in text


def test_mnist_that_cannot_be_had_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Source, "download", lambda *_: "no internet here")
    with pytest.raises(InputError, match="data.root=.*cannot be downloaded \\(no internet here\\)"):
        mnist(0, str(tmp_path))


@pytest.mark.parametrize("load", [mnist, auto_4000])
def test_a_root_that_is_no_folder_is_an_error(tmp_path, load):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data.root=.*file: expected a folder, this is a file"):
        load(0, str(tmp_path / "file"))
    with pytest.raises(InputError, match="data.root=5: expected the name of a folder"):
        load(0, 5)


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
    for load in (mnist, auto_4000):
        with pytest.raises(InputError, match=name):
            load(0, str(tmp_path))


def test_a_torchvision_that_does_not_match_torch_says_so(mnist_root, monkeypatch):
    class Broken:
        def find_spec(self, fullname, path=None, target=None):
            if fullname.startswith("torchvision"):
                raise RuntimeError("operator torchvision::nms does not exist")

    for module in [m for m in sys.modules if m.startswith("torchvision")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(InputError, match=r"torchvision=.*does not work with torch .*nms does not exist.*pip install"):
        mnist(0, str(mnist_root))


def test_md5_of_the_real_files(mnist_root):
    SOURCE.check(mnist_root)
