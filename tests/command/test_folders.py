"""Output folders that nobody else has."""

from concurrent.futures import ThreadPoolExecutor

from mpcompare.command.folders import free


def test_runs_that_begin_in_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda _: free("multirun/one second"), range(40)))
    assert len(set(names)) == 40
    assert sorted(names) == sorted(["multirun/one second", *(f"multirun/one second-{n}" for n in range(2, 41))])
    assert all((tmp_path / name).is_dir() for name in names)


def test_a_folder_that_cannot_be_made_is_left_to_who_writes_there(tmp_path):
    (tmp_path / "file").write_text("")
    assert free(str(tmp_path / "file" / "run")) == str(tmp_path / "file" / "run")
