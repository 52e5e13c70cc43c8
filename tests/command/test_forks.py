"""Entrants are forks of a server, or processes of their own."""

import os
import sys

import pytest

from mpcompare.command import forks

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


@linux
def test_processes_are_forks_and_their_server_ends_with_the_block(monkeypatch):
    monkeypatch.setattr(forks, "PRELOAD", ["json"])
    ended = []
    for value in ("1", "2"):
        monkeypatch.setenv("MPCOMPARE_TEST", value)
        with forks.fork_server() as processes:
            assert processes.get_start_method() == "forkserver"
            server = forks.forkserver._forkserver._forkserver_pid
            ours, theirs = processes.Pipe()
            process = processes.Process(target=_tell, args=(theirs,))
            forks.start(process)
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
    monkeypatch.setattr(forks, "PRELOAD", ["broken"])
    with forks.fork_server() as processes:
        assert processes.get_start_method() == "spawn"


def test_processes_of_their_own_where_environments_differ():
    with forks.fork_server(fork=False) as processes:
        assert processes.get_start_method() == "spawn"
