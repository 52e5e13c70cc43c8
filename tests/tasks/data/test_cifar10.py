import hashlib
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from mpcompare.errors import InputError
from mpcompare.tasks.data import cifar10 as module
from mpcompare.tasks.data.cifar10 import SOURCE, cifar10
from mpcompare.tasks.data.source import Source


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Makes files of CIFAR-10's layout with 4 images each, which torchvision and the module take for the real ones."""
    from torchvision.datasets import CIFAR10

    folder = tmp_path / SOURCE.folder
    folder.mkdir()
    for number, name in enumerate(SOURCE.md5):
        content = {"data": np.full((4, 3072), 40 * number, np.uint8), "labels": [number] * 4}
        if name == "batches.meta":
            content = {"label_names": list("abcdefghij")}
        (folder / name).write_bytes(pickle.dumps(content))
    md5 = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in SOURCE.md5}
    monkeypatch.setattr(module, "SOURCE", replace(SOURCE, md5=md5))
    monkeypatch.setattr(CIFAR10, "train_list", [[n, md5[n]] for n in md5 if n.startswith("data")])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})
    return tmp_path


def test_cifar10_is_read_where_it_is_on_disk_and_normalised(small_cifar, caplog):
    caplog.set_level("INFO")
    dataset = cifar10(0, 100, str(small_cifar))
    assert (dataset.name, dataset.reason) == ("cifar10", f"found in {small_cifar}")
    assert "using CIFAR-10" in caplog.text
    assert (dataset.x_train.shape, dataset.x_test.shape) == ((20, 3, 32, 32), (4, 3, 32, 32))
    assert dataset.x_train.is_contiguous()
    assert (dataset.y_train.dtype, dataset.y_train[::4].tolist()) == (torch.int64, [0, 1, 2, 3, 4])
    expected = (40 / 255 - np.array(module.MEAN)) / np.array(module.STD)  # the second batch's pixels are all 40
    assert dataset.x_train[4, :, 5, 7].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_cifar10_is_named_and_never_replaced(small_cifar, damage):
    path = small_cifar / SOURCE.folder / "data_batch_3"
    path.write_bytes(path.read_bytes()[:99]) if damage == "truncated" else path.unlink()
    with pytest.raises(InputError, match="data_batch_3" + (" is truncated or not CIFAR-10's" * (damage != "missing"))):
        cifar10(0, 100, str(small_cifar))


def test_without_cifar10_the_images_are_synthetic_and_that_is_said_loudly(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Source, "download", lambda *_: "no internet here")
    dataset = cifar10(0, 64, str(tmp_path))
    assert (dataset.name, dataset.x_train.shape) == ("synthetic_images", (64, 3, 32, 32))
    assert "SYNTHETIC IMAGES, NOT CIFAR-10" in caplog.text
    assert "no internet here" in dataset.reason
    with pytest.raises(InputError, match="data.download_limit_s=0: expected a finite number above 0"):
        cifar10(0, 64, str(tmp_path), 0)
