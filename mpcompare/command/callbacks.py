"""Callbacks of Hydra around a run and a sweep: the output folder is tried first, the report is drawn last."""

import sys
import traceback
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from mpcompare.command.folders import check_folder
from mpcompare.errors import InputError, check_flag, fail, fails_on_input_errors

PLANS = "hydra_plugins.mpcompare_launcher.Plan"
TORN = "hydra_plugins.hydra_submitit_launcher."  # Hydra's own launchers for submitit


class ReportOfJobs(Callback):
    """Checks the output folder before anything is computed or written; after a sweep draws its report.

    Hydra turns an exception of a callback into a warning, so an error that must not pass ends the program here.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _check(config, "hydra.run.dir", below=False)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _check(config, "hydra.sweep.dir", below=True)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Draws the report. Ends the program with exit code 1 if a job failed, or differs and report.strict is set.
        Where the input of every job is wrong, says that alone, with exit code 2."""
        if config.hydra.launcher._target_ == PLANS:
            return  # nothing was run
        folder = Path(config.hydra.sweep.dir)
        from mpcompare.records import RESULT, wrong_inputs

        if wrong := wrong_inputs(path.parent for path in sorted(folder.rglob(RESULT))):
            fail(*wrong)
        from mpcompare.report.report import report

        try:
            settings = (OmegaConf.select(config, f"report.{key}") for key in ("baseline", "allow", "strict", "formats"))
            good = report([folder], folder / "report", *settings)
        except (InputError, OSError) as error:
            fail(f"the report cannot be drawn: {error}")
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        if not good:
            sys.exit(1)


def _check(config: DictConfig, folder: str, below: bool) -> None:
    """Ends the program with one line if the output folder will not do, the report cannot be as it was asked for, or the
    job has no name for its files."""
    from mpcompare.report.comparable import check_allowed, check_is_list
    from mpcompare.report.formats import check_formats

    def asked(key: str) -> Any:
        return OmegaConf.select(config, key, throw_on_resolution_failure=False)

    with fails_on_input_errors():
        check_folder(folder, OmegaConf.select(config, folder), below)
        if str(config.hydra.launcher._target_).startswith(TORN):
            chosen = config.hydra.runtime.choices["hydra/launcher"]
            expected = "submits each run by itself, and so would tear a race apart; hydra/launcher=slurm submits races"
            raise InputError("hydra/launcher", chosen, expected)
        if "/" in str(name := config.hydra.job.name):
            raise InputError("hydra.job.name", name, "expected a name for files, without /")
        if not isinstance(config.report, DictConfig):
            return  # the record says so, with an example
        if not isinstance(asked("report.baseline"), str):
            raise InputError("report.baseline", asked("report.baseline"), "expected the name of a backend")
        check_flag("report.strict", asked("report.strict"))
        check_formats(asked("report.formats"))
        check_is_list(allow := asked("report.allow"))
        if not (below and "mpcompare" in str(config.hydra.launcher._target_)):  # our launchers have the jobs' tasks
            task = asked("task")
            check_allowed(allow, [OmegaConf.to_container(task)] if task else [])  # type: ignore[list-item]
