"""The verbs, --version, and the script ``mpcompare``, which stands for ``python -m mpcompare``."""

import importlib
import os
import re
import subprocess
import sys

import pytest

import mpcompare
from mpcompare import command
from mpcompare.command.verbs import LISTS, PROGRAMS, VERBS, as_module
from mpcompare.native import build
from mpcompare.paths import CONF

SCRIPT = "import sys\nfrom mpcompare.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


@pytest.mark.parametrize("words", [["--version"], ["backend=amp", "--version"]])
def test_the_version_is_mpcompares(cli, words):
    ended = cli(*words)
    assert (ended.code, ended.out) == (0, f"mpcompare {mpcompare.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+|unknown", mpcompare.__version__)


@pytest.mark.parametrize("verb", PROGRAMS)
def test_a_program_is_a_verb(cli, verb):
    ended = cli(verb, "--help")
    assert ended.code == 0, ended.err
    assert f"mpcompare.{verb}" in ended.out.splitlines()[0]


def test_a_verb_takes_the_arguments_of_its_program(cli):
    ended = cli("pitfalls", "underflow", "--list")
    assert ended.code == 0, ended.err
    assert ended.out.split()[0] == "underflow"
    assert len(ended.out.splitlines()) == 1


def test_a_word_that_is_no_verb_is_one_line(cli):
    ended = cli("reprot")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(f"mpcompare: error: reprot: expected KEY=VALUE or one of {', '.join(VERBS)} ")
    assert "(did you mean report?)" in line


def test_no_verb_is_a_key_and_an_override_is_never_a_verb(cli):
    """``report.strict=true`` and ``backend=amp`` are Hydra's, although verbs are named alike."""
    assert not {*VERBS} & {path.name for path in CONF.iterdir()}
    ended = cli("report.strict=true", "backend=amp", "--cfg", "job", "-p", "report")
    assert ended.code == 0, ended.err
    assert "strict: true" in ended.out


def test_windows_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="^mpcompare: error: expected Linux or macOS; on Windows, take its subsystem"):
        importlib.reload(command)


def test_env_says_what_a_report_of_a_fault_needs(cli):
    ended = cli("env")
    assert ended.code == 0, ended.err
    said = dict(line.split(maxsplit=1) for line in ended.out.splitlines())
    import torch

    assert said["mpcompare"] == mpcompare.__version__
    assert said["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert f"torch takes {torch.get_num_threads()}" in said["CPU"]
    assert torch.backends.cpu.get_cpu_capability() in said["ISA"]
    assert {"python", "torchvision", "hydra-core", "GPU", "flag", "operators"} <= set(said)


def test_env_says_no_folder(cli, monkeypatch):
    def cpu_recipe():
        raise build.BuildError("no C++ compiler found (looked for /home/somebody/bin/g++)")

    monkeypatch.setattr(build, "cpu_recipe", cpu_recipe)
    ended = cli("env")
    assert "cpu: cannot be built (no C++ compiler found (looked for g++))" in ended.out
    assert "/home" not in ended.out


def test_env_reports_a_torch_that_is_broken(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # what importing it meets
    ended = cli("env")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1].startswith("torch       cannot be imported (")


def test_the_script_imports_from_the_working_directory_and_lists_without_torch(tmp_path):
    """Python puts the folder of a script into ``sys.path``, not the folder in which a user keeps a network."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpcompare").write_text(f"import atexit, sys\n{SCRIPT}".replace(
        "if __name__", "atexit.register(lambda: print(sys.path[0], 'torch' in sys.modules))\nif __name__"
    ))  # fmt: skip
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "bin" / "mpcompare"), "tasks"], cwd=tmp_path, capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONPATH": str(CONF.parent)},
    )  # fmt: skip
    assert ended.stdout.splitlines()[-1] == f"{tmp_path} False"


@pytest.mark.parametrize("first", ["/somewhere", ""])
def test_another_first_folder_stays(monkeypatch, tmp_path, first):
    """The first folder of ``python -m``, of ``-P``, and of a program that calls main()."""
    monkeypatch.setattr(sys, "path", [first, *sys.path])
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "mpcompare")])
    as_module()
    assert sys.path[0] == first


def test_each_list_is_a_group_of_conf():
    assert all((CONF / group).is_dir() for group in LISTS.values())
