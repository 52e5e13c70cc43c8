"""The values with which all entrants are compared are computed in a process in which no backend has been."""

import json

import pytest
from support.command import SMALL


@pytest.mark.slow
def test_a_backend_that_patches_torch_is_found_and_the_others_are_not_accused(cli, tmp_path):
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "patches.yaml").write_text("_target_: support.patches_torch.PatchesTorch\n")
    ended = cli("--config-dir", str(tmp_path / "conf"), "-m", "backend=patches,amp,master_weights", "precision=bf16",
                *SMALL, "verdict.noise=0", "hydra.sweep.dir=sweep")  # fmt: skip
    assert ended.code == 0, ended.err
    verdicts = json.loads((tmp_path / "sweep" / "report" / "verdict.json").read_text())
    words = {name.split("-")[1]: verdict["word"] for name, verdict in verdicts.items()}
    assert words == {"patches": "differs", "amp": "reference", "master_weights": "same"}
    causes = {name.split("-")[1]: verdict["cause"] for name, verdict in verdicts.items()}
    assert (causes["patches"], causes["master_weights"]) == ("torch written", "")
