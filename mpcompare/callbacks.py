"""What Hydra calls around a run and a sweep: the output folder is tried first, the report is drawn last."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from mpcompare.errors import InputError


class Report(Callback):
    """Checks that the output folder can be written before anything is computed; after a sweep draws its report."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _check_writable("hydra.run.dir", config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _check_writable("hydra.sweep.dir", config.hydra.sweep.dir)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Draws the report. Ends the program with exit code 1 if a job failed."""
        from mpcompare.report import report

        folder = Path(config.hydra.sweep.dir)
        if not report([folder], folder / "report", config.report.baseline):
            sys.exit(1)


def _check_writable(field: str, folder: str) -> None:
    """Ends the program with one line if nothing can be written below ``folder``."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = InputError(field, folder, f"cannot write there ({error.strerror}); name a folder that can be written")
        print(f"mpcompare: error: {message}", file=sys.stderr)
        sys.exit(2)
