"""Backends of installed packages are known to --help and to ``backend=``, and imported only when they are chosen."""

import json
import sys
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from support.command import SMALL

BACKEND = '''
from mpcompare.backends.amp import Amp


class MyAmp(Amp):
    """amp with an option."""

    def __init__(self, model, task, precision, loss_scale, speed="high"):
        super().__init__(model, task, precision, loss_scale)
        if speed not in ("high", "low"):
            raise ValueError(speed)
        self.engine = speed
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that puts a package of one module, with its metadata, on ``sys.path``, as pip would have."""
    monkeypatch.setattr(ConfigStore.instance(), "repo", {**ConfigStore.instance().repo})
    ConfigStore.instance().repo["backend"] = {}
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)

    def add(package: str, source: str, **backends: str) -> Path:
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text("")
        (site / package / "backend.py").write_text(source)
        info = site / f"{package}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        lines = [f"{name} = {value}" for name, value in backends.items()]
        (info / "entry_points.txt").write_text("\n".join(["[mpcompare.backends]", *lines, ""]))
        return site / package

    yield add
    for name in [name for name in sys.modules if name.startswith("its_")]:
        del sys.modules[name]


@pytest.mark.slow
def test_help_lists_it_and_imports_nothing(cli, install):
    install("its_amp", "raise SystemError('imported')", my_amp="its_amp.backend:MyAmp")
    ended = cli("--help")
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("backend: ")]
    assert "my_amp" in line.removeprefix("backend: ").split(", ")
    assert "its_amp.backend" not in sys.modules


def test_the_list_has_its_docstring_and_imports_nothing(cli, install):
    install("its_amp", f"{BACKEND}\nraise SystemError('imported')", my_amp="its_amp.backend:MyAmp")
    ended = cli("backends")
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("my_amp ")]
    assert line.split(maxsplit=1)[1] == "amp with an option. (package its_amp 0.1)"


@pytest.mark.parametrize("wrong", [["backend=nobody"], ["backend=[amp,fp32]"]])
def test_what_can_be_chosen_is_said_with_it_and_with_backends_of_config_dir(cli, install, tmp_path, wrong):
    install("its_amp", BACKEND, my_amp="its_amp.backend:MyAmp")
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "of_a_folder.yaml").write_text("_target_: nothing\n")
    ended = cli("--config-dir", str(tmp_path / "conf"), *wrong)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    for name in ("my_amp", "of_a_folder", "master_weights"):
        assert f" {name}," in line


@pytest.mark.slow
def test_a_run_takes_its_options(cli, install, tmp_path):
    install("its_amp", BACKEND, my_amp="its_amp.backend:MyAmp")
    ended = cli(*SMALL, "backend=my_amp", "backend.speed=low", "device=cpu", "verdict.enabled=false",
                f"hydra.run.dir={tmp_path / 'run'}")  # fmt: skip
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["backend"], result["engine"], result["status"]) == ("my_amp", "low", "ok")


@pytest.mark.slow
def test_an_option_that_it_does_not_take_is_one_line(cli, install):
    install("its_amp", BACKEND, my_amp="its_amp.backend:MyAmp")
    ended = cli(*SMALL, "backend=my_amp", "backend.sped=low")
    assert ended.code == 2
    assert ended.err == "mpcompare: error: backend.sped=low: backend=my_amp takes speed\n"


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("import nothing_of_that_name", "its_amp.backend:MyAmp", "nothing_of_that_name"),
        pytest.param(BACKEND, "its_amp.backend:HisAmp", "HisAmp", marks=pytest.mark.slow),
        pytest.param(BACKEND, "its_amp.backend", "non-class", marks=pytest.mark.slow),
        (BACKEND, "its_other:MyAmp", "its_other"),
        pytest.param(
            "raise SystemError('two\\nlines')", "its_amp.backend:MyAmp", "SystemError", marks=pytest.mark.slow
        ),
    ],
)
def test_a_broken_one_is_one_line_when_it_is_chosen(cli, install, source, target, reason):
    install("its_amp", source, my_amp=target)
    assert cli("backend=fp32", "--cfg", "job").code == 0
    ended = cli(*SMALL, "backend=my_amp")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(
        f"mpcompare: error: backend._target_={target.replace(':', '.')}: expected a backend's class "
    )
    assert "of package its_amp 0.1" in line
    assert reason in line


def test_a_name_that_is_taken_is_one_line(cli, install):
    install("its_amp", BACKEND, amp="its_amp.backend:MyAmp")
    ended = cli("--help")
    assert ended.code == 2
    assert ended.err == (
        "mpcompare: error: entry point amp in mpcompare.backends=its_amp.backend:MyAmp: package its_amp 0.1 gives a "
        "backend a name that this project has: uninstall it, or rename its backend\n"
    )


def test_two_packages_cannot_share_a_name(cli, install):
    install("its_amp", BACKEND, my_amp="its_amp.backend:MyAmp")
    install("its_other", BACKEND, my_amp="its_other.backend:MyAmp")
    ended = cli("--help")
    assert ended.code == 2
    assert "a name that package its_" in ended.err


@pytest.mark.slow
def test_it_takes_part_in_a_sweep(cli, install, tmp_path):
    """Each entrant imports the class in a process of its own, which gets the composed configuration."""
    install("its_amp", BACKEND, my_amp="its_amp.backend:MyAmp")
    ended = cli("-m", *SMALL, "backend=amp,my_amp", "device=cpu", "verdict.enabled=false",
                f"hydra.sweep.dir={tmp_path / 'sweep'}")  # fmt: skip
    assert ended.code == 0, ended.err
    results = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("*/result.json")]
    assert {(r["backend"], r["engine"], r["status"]) for r in results} == {
        ("amp", "torch", "ok"), ("my_amp", "high", "ok"),
    }  # fmt: skip
