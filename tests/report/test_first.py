"""The first verdicts of a race are the verdicts of its report, as long as the timing finds nothing."""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.command import SMALL

from mpcompare.report.comparison import compare
from mpcompare.report.runs import find_runs
from mpcompare.report.verdicts import first_verdicts, judge_all, settled
from mpcompare.verdict.judge.check import Check
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word

NAMES = ["0-scratch-auto", "1-amp-auto", "2-wrong-auto", "3-fp32-auto"]
AT_START = ("backend", "precision", "task", "batch_size", "seed", "sweep", "config")
OF_TIMING = ("step_ms", "samples_per_s", "tflops", "timing", "timed_", "phase", "inference")


@pytest.fixture
def race(cli, tmp_path):
    """Returns the folder of a finished race, and a function that makes its folders as they were when some had trained.
    The function takes the number of those runs, and returns the arguments of ``first_verdicts``."""
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "wrong.yaml").write_text("_target_: planted.mlp.MeanTakenTwice\n")
    ended = cli("--config-dir", str(tmp_path / "conf"), "-m", "backend=scratch,amp,wrong,fp32", *SMALL,
                "hydra/launcher=basic", "verdict.noise=1", f"hydra.sweep.dir={tmp_path / 'sweep'}")  # fmt: skip
    assert ended.code == 0, ended.err

    def after(trained):
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "sweep"
        shutil.copytree(tmp_path / "sweep", folder)
        for place, name in enumerate(NAMES):
            file = folder / name / "result.json"
            result = {**json.loads(file.read_text()), "status": "running"}
            (folder / name / "blocks.csv").unlink()
            if place < trained:
                result = {key: value for key, value in result.items() if not key.startswith(OF_TIMING)}
            else:
                result = {"status": "running", **{key: result[key] for key in AT_START}, "precision": "auto"}
                (folder / name / "numerics.json").unlink()
                (folder / name / "steps.csv").unlink()
            file.write_text(json.dumps(result))
        return {name: folder / name for name in NAMES}, NAMES[:trained], NAMES[trained:]

    return tmp_path / "sweep", after


@pytest.mark.slow
def test_a_verdict_is_said_once_its_reference_is_known_and_is_as_in_the_report(race):
    folder, after = race
    assert first_verdicts(*after(1)) == {}  # the baseline is still to come
    assert first_verdicts(*after(2)) == {
        "0-scratch-auto": "scratch bf16: same so far (compared with amp bf16)",
        "1-amp-auto": "amp bf16: reference so far",
    }
    assert first_verdicts(*after(3))["2-wrong-auto"] == "wrong bf16: differs: gradient scaled (compared with amp bf16)"
    lines = first_verdicts(*after(4))
    assert lines["3-fp32-auto"] == "fp32: reference so far"
    (comparison,) = compare(find_runs([folder]), "amp")
    verdicts = judge_all(comparison)
    assert {name: line.split(" (compared")[0].replace(" so far", "") for name, line in lines.items()} == {
        entry.run.name: f"{entry.label}: {verdicts[entry.run.name]}" for entry in comparison.entries
    }

    # A baseline that is not in the race may be what still comes: verdicts wait until all have trained.
    assert first_verdicts(*after(3), baseline="master_weights") == {}
    lines = first_verdicts(*after(4), baseline="master_weights")
    assert lines["0-scratch-auto"] == "scratch bf16: reference so far"
    assert lines["1-amp-auto"] == "amp bf16: same so far (compared with scratch bf16)"


def test_a_verdict_is_settled_unless_timed_steps_come_before_its_cause():
    check = Check("gradient", 2.0, 1.0, "gradient scaled", "because", kind="gradients")
    passed = replace(check, value=0.5)
    assert settled(Verdict(Word.DIFFERS, "gradient scaled", checks=[passed, check]))
    assert not settled(Verdict(Word.DIFFERS, "run", checks=[passed, replace(check, kind="run")]))
    assert not settled(Verdict(Word.SAME, checks=[passed]))
