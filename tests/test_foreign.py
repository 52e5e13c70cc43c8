import os

import pytest

from mpcompare.foreign import check_private, parsed, printable, read_bytes


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path.__class__("/dev/zero")):
        with pytest.raises(ValueError, match="is no regular file"):
            read_bytes(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="sparse has 1099511627776 bytes, and 268435456 are read at most"):
        read_bytes(tmp_path / "sparse")


@pytest.mark.parametrize("levels", [52, 900, 100_000])
def test_json_that_is_too_deep_is_refused(levels):
    assert parsed(b"[" * 51 + b"]" * 51)
    with pytest.raises(ValueError, match="more than 50 deep"):
        parsed(b"[" * levels + b"]" * levels)


def test_what_steers_a_terminal_is_shown_as_its_escape():
    steers = {"\x1b[2J": ["a\u202eb", "\x07", "line\n\tnext", "plain", 5, None]}
    assert printable(steers) == {"\\x1b[2J": ["a\\u202eb", "\\x07", "line\n\tnext", "plain", 5, None]}


def test_a_file_that_others_can_write_is_not_private(tmp_path):
    file = tmp_path / "folder" / "library.so"
    file.parent.mkdir(mode=0o755)
    file.touch(mode=0o644)
    check_private(file)
    for path, mode in ((file, 0o666), (file.parent, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(ValueError, match=f"{path} can be written by others"):
            check_private(file)
        path.chmod(before)
    file.parent.chmod(0o1777)  # as /tmp: nobody can move the files of others
    check_private(file)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("group", [0, 4321])
def test_a_file_of_another_user_or_group_is_not_private(tmp_path, group):
    file = tmp_path / "library.so"
    file.touch()
    file.chmod(0o664)
    os.chown(file, 0, group)
    if group:
        with pytest.raises(ValueError, match="can be written by others"):
            check_private(file)
    os.chown(file, 1234, 1234)
    with pytest.raises(ValueError, match="can be written by others"):
        check_private(file)
