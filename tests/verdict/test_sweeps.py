"""Verdicts at the end of a sweep."""

import json

import pytest
from support.command import SMALL
from support.marks import CUDA

from mpcompare.report.__main__ import main as report_main


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "side_by_side"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_sweep_ends_with_a_verdict_on_each(cli, tmp_path, device, launcher):
    folder = tmp_path / "sweep"
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "wrong.yaml").write_text("_target_: planted.mlp.MeanTakenTwice\n")
    arguments = (*SMALL, f"device={device}", "precision=bf16", "verdict.noise=1", f"hydra.sweep.dir={folder}",
                 f"hydra/launcher={launcher}")  # fmt: skip
    ended = cli("--config-dir", str(tmp_path / "conf"), "-m", "backend=scratch,amp,wrong", *arguments)
    assert ended.code == 0, ended.err  # report.strict=false
    verdicts = json.loads((folder / "report" / "verdict.json").read_text())
    words = {name: (v["word"], v["cause"]) for name, v in verdicts.items()}
    assert words == {
        "0-scratch-bf16": ("same", ""),
        "1-amp-bf16": ("reference", ""),
        "2-wrong-bf16": ("differs", "gradient scaled"),
    }
    checks = {c["name"]: c for c in verdicts["2-wrong-bf16"]["checks"]}
    assert checks["gradient in the first step, layer1.weight"]["passed"] is False
    assert "differs: gradient scaled: every gradient is 0.0156" in ended.out
    assert "times what it should be: 1 / the batch size" in ended.out
    assert cli(str(folder), "--strict", main=report_main).code == 1


@pytest.mark.slow
def test_verdicts_can_be_left_out(cli, tmp_path):
    folder = tmp_path / "sweep"
    ended = cli(
        "-m",
        "backend=scratch,amp",
        *SMALL,
        "hydra/launcher=basic",
        "verdict.enabled=false",
        f"hydra.sweep.dir={folder}",
    )
    assert ended.code == 0, ended.err
    verdicts = json.loads((folder / "report" / "verdict.json").read_text())
    assert {v["word"] for v in verdicts.values()} == {"not examined"}
    assert not list(folder.glob("*/numerics.json"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "verdict.noise=-1", "verdict.noise=-1: expected a whole number of at least 0", marks=pytest.mark.slow
        ),
        ("verdict.enabled=maybe", "verdict.enabled=maybe: expected true or false"),
    ],
)
def test_bad_values_are_one_line(cli, override, message):
    ended = cli(*SMALL, override)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1
