"""Entrants are forks of a server, or processes of their own."""

import os
import sys

import pytest

from mpcompare.command import nursery

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


@linux
def test_processes_are_forks_and_their_server_ends_with_the_block(monkeypatch):
    monkeypatch.setattr(nursery, "PRELOAD", ["json"])
    ended = []
    for value in ("1", "2"):
        monkeypatch.setenv("MPCOMPARE_TEST", value)
        with nursery.nursery() as processes:
            assert processes.get_start_method() == "forkserver"
            server = nursery.forkserver._forkserver._forkserver_pid
            ours, theirs = processes.Pipe()
            process = processes.Process(target=_tell, args=(theirs,))
            nursery.start(process)
            parent, environment = ours.recv()
            process.join()
            assert (parent, environment, process.exitcode) == (server, value, 0)
        ended.append(server)
    for server in ended:
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)


def _tell(pipe):
    pipe.send((os.getppid(), os.environ["MPCOMPARE_TEST"]))


@linux
def test_a_server_that_dies_when_it_imports_leaves_it_to_the_entrants_to_say_why(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("import os; os._exit(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nursery, "PRELOAD", ["broken"])
    with nursery.nursery() as processes:
        assert processes.get_start_method() == "spawn"


def test_processes_of_their_own_where_environments_differ():
    with nursery.nursery(fork=False) as processes:
        assert processes.get_start_method() == "spawn"
