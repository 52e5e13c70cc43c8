"""The package in examples/my_amp is installed as its users would, and gets a verdict; the page shows its files."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv

import pytest
from support.command import SMALL

from mpcompare.paths import CONF
from mpcompare.testing import check_backend, small_tasks

ROOT = CONF.parent
EXAMPLE = ROOT / "examples" / "my_amp"
PAGE = (ROOT / "docs" / "your_backend.md").read_text()


def shown() -> dict[str, str]:
    """Returns the files that the page shows: each block of code below a line with its name."""
    return dict(re.findall(r"`examples/my_amp/([\w/.]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))


def test_the_page_shows_the_files_of_the_example():
    assert set(shown()) == {"pyproject.toml", "my_amp/backend.py", "tests/test_backend.py"}
    for name, text in shown().items():
        assert text == (EXAMPLE / name).read_text(), name
    python = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert sorted(python) == sorted(text for name, text in shown().items() if name.endswith(".py"))


@pytest.mark.slow
def test_the_backend_of_the_example_keeps_the_contract(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from my_amp.backend import MyAmp

    mlp = {"mlp": small_tasks()["mlp"]}
    assert check_backend(MyAmp, precision="fp16", tasks=mlp).candidates == ["mlp fp16"]


@pytest.mark.slow
def test_the_example_is_installed_tested_and_judged(tmp_path):
    """In a new environment that sees the packages of this one, without a network and with no file of this project
    changed."""
    package, environment = tmp_path / "my_amp", tmp_path / "venv"
    shutil.copytree(EXAMPLE, package, ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(environment, with_pip=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    seen = [str(ROOT), *(entry for entry in sys.path if entry.endswith("-packages"))]
    (packages / "seen.pth").write_text("\n".join(seen) + "\n")
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: str) -> str:
        ended = subprocess.run(
            [str(environment / "bin" / "python"), "-m", *command], cwd=package, env=kept, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run("pip", "uninstall", "--yes", "setuptools")  # Python 3.11 brings an old one, which hides ours
    run("pip", "install", "--no-index", "--no-build-isolation", ".")
    assert "1 passed" in run("pytest", "-p", "no:cacheprovider", "tests")
    sweep = tmp_path / "sweep"
    run("mpcompare", "-m", "backend=amp,my_amp", "device=cpu", *SMALL, f"hydra.sweep.dir={sweep}", "report.strict=true")
    verdicts = json.loads((sweep / "report" / "verdict.json").read_text())
    assert [(name, verdict["word"]) for name, verdict in verdicts.items()] == [
        ("0-amp-auto", "reference"), ("1-my_amp-auto", "same"),
    ]  # fmt: skip
