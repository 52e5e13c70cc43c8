import socket
from dataclasses import replace

import pytest

from mpcompare.tasks.data import cifar10, mnist
from mpcompare.tasks.data.source import find_root

SOURCES = pytest.mark.parametrize("source", [mnist.SOURCE, cifar10.SOURCE], ids=["mnist", "cifar10"])


@pytest.mark.parametrize("value", ["", None])
def test_an_empty_environment_variable_is_none(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPCOMPARE_DATA", "") if value == "" else monkeypatch.delenv("MPCOMPARE_DATA", raising=False)
    assert find_root(None) == (str(tmp_path / "mpcompare"), tmp_path / "mpcompare")


@SOURCES
def test_download_without_internet_gives_a_reason_in_seconds(tmp_path, source):
    refused = replace(source, mirror="http://127.0.0.1:9/nothing")  # the discard port: refused at once
    assert "refused" in refused.download(tmp_path, 5)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_mirror_that_does_not_answer_is_waited_for_3_seconds(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = replace(mnist.SOURCE, mirror=f"http://127.0.0.1:{silent.getsockname()[1]}/nothing")
        assert mute.download(tmp_path, 60) == "no answer within 3 s"


@SOURCES
def test_download_moves_whole_files_into_place(tmp_path, source):
    made = tmp_path / "made"
    made.mkdir()
    for name in source.md5:
        (made / name).write_bytes(name.encode())
    script = f"import shutil, sys; shutil.copytree({str(made)!r}, sys.argv[1] + '/{source.folder}')"
    root = tmp_path / "root"
    assert not source.on_disk(root)
    assert replace(source, mirror="data:,ok", script=script).download(root, 60) is None
    assert source.on_disk(root)
    assert sorted(p.name for p in (root / source.folder).iterdir()) == sorted(source.md5)
    assert [p.name for p in root.iterdir()] == [source.folder.split("/")[0]]  # nothing left over


@pytest.mark.parametrize(("script", "reason"), [("import time; time.sleep(60)", "not done within 0.5 s"),
                                                ("raise OSError('disk full')", "OSError: disk full")])  # fmt: skip
def test_a_download_that_hangs_or_fails_leaves_nothing(tmp_path, script, reason):
    source = replace(mnist.SOURCE, mirror="data:,ok", script=script)
    assert source.download(tmp_path, 0.5 if "sleep" in script else 60) == reason
    assert not list(tmp_path.iterdir())


def test_cifar10_files_are_those_that_torchvision_knows():
    from torchvision.datasets import CIFAR10

    known = dict([*CIFAR10.train_list, *CIFAR10.test_list])
    known[CIFAR10.meta["filename"]] = CIFAR10.meta["md5"]
    assert cifar10.SOURCE.md5 == known
    assert (cifar10.SOURCE.folder, cifar10.SOURCE.mirror) == (CIFAR10.base_folder, CIFAR10.url)
