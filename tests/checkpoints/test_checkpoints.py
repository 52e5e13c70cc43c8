"""Checkpoints are loaded bit for bit as they were saved, and damage is named in one line."""

import hashlib
import json
import logging
import math
import os
import resource
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mpcompare.checkpoints import CHECKPOINTS, Checkpoint, files, load, newest, save
from mpcompare.errors import InputError

TENSORS, CONTENT = files.TENSORS, files.CONTENT
WHAT_IS_TRAINED = {"task": {"model": {"hidden": [32, 16]}, "lr": 0.1}, "seed": 0, "backend": "amp", "data": "0f3a"}


def checkpoint(step=3, **changes):
    steps = torch.tensor(float(step))
    state = {
        "params": {"0.weight": torch.arange(6.0).reshape(2, 3) + step, "0.bias": torch.ones(2)},
        "buffers": {"1.num_batches_tracked": torch.tensor(step), "mask": torch.tensor([True, False])},
        "optimizer": {"exp_avg": {"0.weight": torch.full((2, 3), 0.1)}, "step": {"0.weight": steps}},
        "loss_scale": {"scale": 65536.0, "growth_tracker": step},
    }
    generators = {"cpu": torch.Generator().manual_seed(step).get_state()[:40]}
    return replace(Checkpoint(state, step, step - 1, step, WHAT_IS_TRAINED, generators), **changes)


def bits(tensor):
    plain = tensor.detach().flatten().clone(memory_format=torch.contiguous_format)
    return (tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).tolist())


def groups(checkpoint):
    """Returns all tensors by group, as bits, in their order."""
    state = checkpoint.state
    named = {name: state[name] for name in ("params", "buffers")}
    named.update(state["optimizer"], generators=checkpoint.generators)
    return {group: [(name, bits(tensor)) for name, tensor in tensors.items()] for group, tensors in named.items()}


def assert_same(found, saved):
    assert groups(found) == groups(saved)
    assert set(found.state) == set(saved.state)
    assert list(found.state["optimizer"]) == list(saved.state["optimizer"])
    assert repr(found.state["loss_scale"]) == repr(saved.state["loss_scale"])  # -0.0, nan, and int is not float
    assert (found.step, found.updates, found.position) == (saved.step, saved.updates, saved.position)
    assert found.what_is_trained == saved.what_is_trained


def refused(path, match, **options):
    with pytest.raises(InputError, match=match) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"resume={path}: ")


# A saved checkpoint is loaded.


@st.composite
def random_tensors(draw):
    """Draws tensors of any bits and layouts; some are tied, overlap, or are views of one buffer."""
    made, generator = {}, torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    for number in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(["w", "0.weight", "a/b", "größe", "params", "__metadata__"])) + str(number)
        layout = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "tied", "part", "parameter"]))
        if layout in ("tied", "part") and made:
            other = draw(st.sampled_from(list(made.values())))
            made[name] = other if layout == "tied" else other.detach()[..., :1] if other.dim() else other.view(1)
            continue
        dtype = draw(st.sampled_from(sorted(files.DTYPES, key=str)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        if layout == "strided":
            shape = [2 * n for n in shape]
        n = math.prod(shape)
        high = 2 if dtype == torch.bool else 256
        tensor = torch.randint(high, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensor = tensor.view(dtype).reshape(shape)
        if layout == "transposed" and len(shape) > 1:
            tensor = tensor.transpose(0, -1)
        elif layout == "strided" and shape:
            tensor = tensor[..., ::2]
        elif layout == "expanded":
            tensor = tensor.unsqueeze(0).expand(3, *shape)
        elif layout == "parameter" and dtype.is_floating_point:
            tensor = torch.nn.Parameter(tensor)
        made[name] = tensor
    return made


NUMBERS = st.one_of(st.floats(), st.integers(1 - 2**63, 2**63 - 1))  # a larger one is no count


@pytest.mark.slow
@given(
    st.fixed_dictionaries(
        {
            "params": random_tensors(),
            "buffers": random_tensors(),
            "optimizer": st.dictionaries(st.sampled_from(["momentum_buffer", "exp_avg", "step"]), random_tensors()),
            "loss_scale": st.dictionaries(st.text(), NUMBERS),
        }
    ),
    random_tensors(),
    st.integers(0, 2**40),
)
def test_any_state_comes_back_bit_for_bit(tmp_path_factory, state, generators, step):
    saved = Checkpoint(state, step, step // 2, step + 1, WHAT_IS_TRAINED, generators)
    folder = tmp_path_factory.mktemp("checkpoints")
    path = save(folder, saved)
    assert path == newest(folder)
    found = load(path)
    assert_same(found, saved)
    memory = [t.data_ptr() for n in (found.state["params"], *found.state["optimizer"].values()) for t in n.values()]
    assert len(set(memory) - {0}) == len([pointer for pointer in memory if pointer])


def test_numbers_that_compare_as_others_survive(tmp_path):
    patterns = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000]
    values = torch.frombuffer(bytearray(struct.pack("<8I", *patterns)), dtype=torch.float32)
    scale = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "zero": -0.0, "tiny": 5e-324, "third": 1 / 3}
    saved = checkpoint()
    saved.state["params"]["0.bias"] = values
    saved.state["loss_scale"].update(scale)
    save(tmp_path, saved)
    found = load(tmp_path)
    assert_same(found, saved)
    assert found.state["params"]["0.bias"].view(torch.int32).tolist() == values.view(torch.int32).tolist()


def test_what_json_lacks_comes_back_as_records_have_it(tmp_path):
    save(tmp_path, checkpoint(what_is_trained={"limit": math.inf, "betas": (0.9, 0.999), "none": None}))
    assert load(tmp_path).what_is_trained == {"limit": "inf", "betas": [0.9, 0.999], "none": None}


def test_tensors_of_flat_memory_are_not_copied():
    flat = torch.arange(10.0)
    parts = {"a": flat[:4], "b": flat[4:], "all": flat}
    apart = files._apart(dict(list(parts.items())[:2]))
    assert [apart[name].data_ptr() for name in "ab"] == [parts[name].data_ptr() for name in "ab"]
    apart = files._apart(parts)
    assert len({apart[name].untyped_storage().data_ptr() for name in parts}) > 1
    assert all(torch.equal(apart[name], parts[name]) for name in parts)


def test_other_programs_can_read_it(tmp_path):
    path = save(tmp_path, checkpoint())
    assert sorted(file.name for file in path.iterdir()) == [CONTENT, TENSORS]
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {"0o644"}
    assert torch.equal(load_file(path / TENSORS)["optimizer/exp_avg/0.weight"], torch.full((2, 3), 0.1))
    content = json.loads((path / CONTENT).read_text())
    assert content["tensors"]["sha256"] == hashlib.sha256((path / TENSORS).read_bytes()).hexdigest()
    assert (content["step"], content["identity"]) == (3, WHAT_IS_TRAINED)


def test_the_same_state_has_the_same_bytes(tmp_path):
    first, second = (save(tmp_path / name, checkpoint()) for name in "ab")
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in (TENSORS, CONTENT))


def test_a_state_that_would_lose_something_is_not_saved(tmp_path):
    save(tmp_path, checkpoint(2))
    state = checkpoint().state
    with pytest.raises(InputError, match="state=params, buffers, optimizer, loss_scale, more: expected params, "):
        save(tmp_path, checkpoint(state={**state, "more": {}}))
    with pytest.raises(InputError, match="state=a/b: expected a word without '/'"):
        save(tmp_path, checkpoint(state={**state, "optimizer": {"a/b": {}}}))
    with pytest.raises(InputError, match="checkpoint of loss_scale.scale=tensor.2..: expected a number"):
        save(tmp_path, checkpoint(state={**state, "loss_scale": {"scale": torch.tensor(2.0)}}))
    for tensor in (torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()):
        with pytest.raises(InputError, match="checkpoint of buffers/x=.*: safetensors cannot hold it"):
            save(tmp_path, checkpoint(state={**state, "buffers": {"x": tensor}}))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


# A damaged checkpoint is one line.


@pytest.mark.slow
def test_every_byte_of_both_files_counts(tmp_path):
    small = Checkpoint({"params": {"w": torch.ones(2)}, "buffers": {}, "optimizer": {}, "loss_scale": {}}, 3, 3, 3, {})
    path = save(tmp_path, small)
    for name in (TENSORS, CONTENT):
        file = path / name
        whole = file.read_bytes()
        for at in range(len(whole)):
            file.write_bytes(whole[:at])
            refused(path, name)
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            refused(path, f"{name}|format version")
        file.write_bytes(whole + b"\n")
        refused(path, name)
        file.write_bytes(whole)
    assert_same(load(path), small)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda path: (path / TENSORS).unlink(), "there is no state.safetensors$"),
        (lambda path: (path / CONTENT).unlink(), "there is no checkpoint.json$"),
        (lambda path: (path / TENSORS).write_bytes(b""), r"safetensors has 0 bytes, and checkpoint.json says \d+"),
        (lambda path: (path / CONTENT).write_bytes(b""), "checkpoint.json is no JSON, or is cut off"),
        (lambda path: (path / CONTENT).write_bytes(b"\xff\xfe\x00"), "checkpoint.json is no JSON"),
        (lambda path: (path / CONTENT).write_text("[" * 100_000), "checkpoint.json is no JSON"),
        (lambda path: (path / CONTENT).write_text("[1]"), "checkpoint.json is none of mpcompare's$"),
        (lambda path: (path / CONTENT).write_text('{"step": 3}'), "checkpoint.json is none of mpcompare's$"),
        (lambda path: save_file({"w": torch.ones(3)}, path / TENSORS), "state.safetensors has"),
        (lambda path: edit(path, '"growth_tracker": 3', '"growth_tracker": 4'), "json has been changed: its content"),
        (lambda path: edit(path, '"version": 1', '"version": 2'), "has format version 2, and this mpcompare reads 1$"),
        (lambda path: rewrite(path, version=7), "it has format version 7, and this mpcompare reads 1$"),
        (lambda path: rewrite(path, step=4), "its name says step 3, and checkpoint.json says 4$"),
        (lambda path: [file.unlink() for file in path.iterdir()], "there is no checkpoint.json$"),
        (lambda path: ((path / TENSORS).unlink(), (path / TENSORS).mkdir()), "state.safetensors"),
        (lambda path: ((path / CONTENT).unlink(), (path / CONTENT).mkdir()), "json is no regular file$"),
        (lambda path: ((path / TENSORS).unlink(), os.mkfifo(path / TENSORS)), "safetensors is no regular file$"),
        (lambda path: ((path / CONTENT).unlink(), os.mkfifo(path / CONTENT)), "json is no regular file$"),
        (lambda path: rewrite(path, step=-3), "expected a whole number of at least 0"),
        (lambda path: rewrite(path, position=10**30), "expected a whole number of at least 0"),
        (lambda path: rewrite(path, loss_scale={"scale": "2"}), "loss_scale.scale=.2.: expected a number"),
    ],
)
def test_each_damage_is_named(tmp_path, damage, match):
    path = save(tmp_path, checkpoint())
    damage(path)
    refused(path, f"step-000003: .*{match}")
    refused(tmp_path, f"step-000003: .*{match}")


def edit(path, old, new):
    text = (path / CONTENT).read_text()
    assert text.count(old) == 1
    (path / CONTENT).write_text(text.replace(old, new))


def rewrite(path, **changes):
    """Changes ``checkpoint.json`` and its digest with it."""
    content = {**json.loads((path / CONTENT).read_text()), **changes}
    del content["sha256"]
    body = json.dumps(content)[1:]
    (path / CONTENT).write_text(files._first_line(body.encode()) + "\n" + body)


@pytest.mark.parametrize("key", ["step", "updates", "position", "loss_scale", "groups", "tensors"])
def test_a_digest_that_is_right_is_not_believed_blindly(tmp_path, key):
    path = save(tmp_path, checkpoint())
    for value in (None, "x", [1], 1.5, True, *([{"params": []}, {"params": 1}] if key != "loss_scale" else [])):
        rewrite(path, **{key: value})
        refused(path, "checkpoint.json")


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    first, second = save(tmp_path, checkpoint(2)), save(tmp_path, checkpoint(3))
    assert (first / TENSORS).stat().st_size == (second / TENSORS).stat().st_size
    aside = tmp_path / "aside"
    for name in (TENSORS, CONTENT):
        (first / name).rename(aside)
        (second / name).rename(first / name)
        aside.rename(second / name)
        if name == TENSORS:
            refused(first, "state.safetensors has SHA-256 .*, and checkpoint.json says ")
            refused(second, "state.safetensors has SHA-256 .*, and checkpoint.json says ")
    refused(first, "its name says step 2, and checkpoint.json says 3$")
    assert load(first.rename(tmp_path / "best")).step == 3  # another name says nothing


def test_where_there_is_none_is_one_line(tmp_path):
    refused(tmp_path, "holds no checkpoint$")
    refused(tmp_path / "nothing", "no such folder$")
    refused(tmp_path / "step-000003", "no such folder$")
    refused(tmp_path / ("x" * 300), "cannot be read .File name too long.$")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "no such folder$")
    (tmp_path / ".step-000001-half").mkdir()
    (tmp_path / "step-12").mkdir()
    refused(tmp_path, "holds no checkpoint$")
    assert newest(tmp_path) is None


# One of several.


def test_the_newest_of_a_folder_or_a_run_is_meant(tmp_path):
    for step in (9, 10, 1_000_000):
        save(tmp_path / CHECKPOINTS, checkpoint(step), keep=3)
    assert load(tmp_path).step == load(tmp_path / CHECKPOINTS).step == 1_000_000
    assert load(tmp_path / CHECKPOINTS / "step-000009").step == 9


def test_an_older_one_is_taken_only_where_asked_and_said(tmp_path, caplog):
    paths = [save(tmp_path, checkpoint(step), keep=3) for step in (1, 2, 3)]
    for path, name in ((paths[2], TENSORS), (paths[1], CONTENT)):
        (path / name).write_bytes((path / name).read_bytes()[:-1])
    refused(tmp_path, "step-000003: state.safetensors has")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert_same(load(tmp_path, older=True), checkpoint(1))
        assert load(paths[1], older=True).step == 1
    everything, from_the_second = (record.message for record in caplog.records)
    start = f"resume={tmp_path}: continues from the older step-000001, because of step-000003: state.safetensors"
    assert everything.startswith(start)
    assert "; step-000002: checkpoint.json" in everything
    assert "step-000003" not in from_the_second
    (paths[0] / TENSORS).unlink()
    refused(tmp_path, "no checkpoint there can be read: step-000003: .*; step-000002: .*; step-0.*1: there", older=True)


def test_the_last_two_are_kept(tmp_path):
    for step in range(1, 6):
        path = save(tmp_path, checkpoint(step))
        assert path == newest(tmp_path)
        assert steps(tmp_path) == [step - 1, step][-min(step, 2) :]
    save(tmp_path, checkpoint(7), keep=1)
    assert steps(tmp_path) == [7]
    with pytest.raises(InputError, match="keep=0"):
        save(tmp_path, checkpoint(8), keep=0)


def steps(folder):
    assert all(path.name.startswith("step-") for path in folder.iterdir())
    return sorted(load(path).step for path in folder.iterdir())


def test_checkpoints_of_another_course_do_not_stay_the_newest(tmp_path, caplog):
    for step in (1, 2, 3, 4):
        save(tmp_path, checkpoint(step), keep=4)
    with caplog.at_level(logging.WARNING):
        save(tmp_path, checkpoint(2, updates=0))
    assert steps(tmp_path) == [1, 2]
    assert load(newest(tmp_path)).updates == 0
    assert [f"step-00000{step}: training went back" in caplog.text for step in (1, 3, 4)] == [False, True, True]


def test_what_a_killed_save_left_is_removed(tmp_path):
    save(tmp_path, checkpoint(1))
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".step-000002-abcd")
    (tmp_path / ".step-000002-abcd" / CONTENT).unlink()
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.replaced")
    (tmp_path / ".step-000003-abcd").write_text("a file")
    (tmp_path / "step-000000").write_text("a file")
    (tmp_path / "notes").mkdir()
    assert load(tmp_path).step == 1
    save(tmp_path, checkpoint(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-000001", "step-000002"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["1,2 3", "2 2", "1,2 2", "1,2,3 2", "sometime"])
def test_a_save_that_is_killed_leaves_whole_checkpoints(tmp_path, when):
    script = Path(__file__).parents[1] / "support" / "killed_saves.py"
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "checkpoints"), *when.split()]
    root = str(script.parents[2])
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": root}, check=False
    )
    assert ended.returncode == 0, ended.stderr


# A disk that fails.


def fails(folder, reason):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"cannot write there .*{reason}.*; what was there stays") as caught:
        save(folder, checkpoint(3))
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert steps(folder) == [1, 2]


def test_a_full_disk_is_one_line_and_what_was_there_stays(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, checkpoint(step))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # no file may be larger; Python ignores the signal
    try:
        fails(tmp_path, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def full(*args):
        raise OSError(28, "No space left on device")

    for owner, name in ((Path, "write_bytes"), (os, "fsync"), (os, "mkdir"), (Path, "rename")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            fails(tmp_path, "No space left on device")
    assert steps(save(tmp_path, checkpoint(3)).parent) == [2, 3]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="checkpoints=.*: cannot write there .Not a directory."):
        save(tmp_path / "file" / "checkpoints", checkpoint())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_line(tmp_path):
    for step in (1, 2):
        save(tmp_path, checkpoint(step))
    tmp_path.chmod(0o555)
    try:
        fails(tmp_path, "Permission denied")
    finally:
        tmp_path.chmod(0o755)


def test_an_old_one_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save(tmp_path, checkpoint(step))

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(shutil, "rmtree", busy)
        save(tmp_path, checkpoint(3))
    assert f"cannot delete the old checkpoint {tmp_path / 'step-000001'} (Device or resource busy)" in caplog.text
    save(tmp_path, checkpoint(4))
    assert steps(tmp_path) == [3, 4]
