"""The scripts that show what looks like a bug of a library run, each with the library alone."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.marks import slow_after

UPSTREAM = Path(__file__).parents[1] / "docs" / "upstream"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", slow_after(1, ["torch_fused_sgd", "torch_sums_in_bf16", "deepspeed_growth_step", "deepspeed_adamw_count"])
)
def test_the_script_runs_without_this_project(name, tmp_path):
    library = name.partition("_")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = UPSTREAM / f"{name}.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{library} " in done.stdout
    assert "mpcompare" not in script.read_text()


def test_every_script_is_in_the_list():
    listed = (UPSTREAM / "README.md").read_text()
    assert all(f"]({path.name})" in listed for path in UPSTREAM.glob("*.py"))
