"""Writes what the verdict says of each peer, in every precision that it claims: docs/peers/peers.csv.

    python scripts/peers.py [fabric keras ...]    verdicts on two small tasks, with momentum and with AdamW
    python scripts/peers.py --time [fabric ...]   times and memory, into the rows with AdamW of the same table

The verdicts may be made while other programs run. The times come from a sweep with amp for each precision, on a larger
MLP with AdamW, which all peers have. Run it on a quiet machine. New verdicts leave the times empty.
"""

import argparse
import csv
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf

import mpcompare
from mpcompare.backends.amp import Amp
from mpcompare.backends.peers.fabric import FabricRow
from mpcompare.errors import BackendUnavailable, InputError
from mpcompare.instruments import machine
from mpcompare.paths import CONF
from mpcompare.report.runs import Run
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.data.generated import digits
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import AdamW, Optimizer, Sgd
from mpcompare.tasks.task import Task
from mpcompare.testing import Candidate, examined_run

STEPS, BATCH = 12, 128
OPTIMIZERS: dict[str, Optimizer] = {"momentum": Sgd(0.05, 0.9), "adamw": AdamW(1e-3)}
OPTIONS: dict[str, list[dict[str, Any]]] = {"fabric": [{}, {"plugin": True}]}
COLUMNS = (
    *("backend", "options", "precision", "optimizer", "verdict", "cause", "detail", "first_scale", "last_scale"),
    *("clip_norm", "computes", "ms", "time_vs_amp", "time_vs_amp_low", "time_vs_amp_high", "peak_bytes", "because"),
)
TIMED: dict[str, Any] = {
    "task": "mnist_mlp", "task.model.hidden": [256], "task.batch_size": 512, "optimizer": "adamw",
    "verdict.enabled": False, "inference.enabled": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/peers/peers.csv"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--time", action="store_true", help="measure, and leave the verdicts as they are")
    parser.add_argument("--budget", type=float, default=240, help="seconds of timing for each precision")
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="some of the peers (default: all)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = machine.select_device(args.device)
    if args.time:
        fill_in(args.out, args.backends or [*peers()], device, args.budget)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for optimizer in OPTIMIZERS:
            for row in rows(optimizer, args.backends or peers(), device):
                print(" ".join(str(row[name]) for name in COLUMNS[:7]), flush=True)
                writer.writerow(row)


def peers() -> dict[str, Any]:
    """Returns the peers that ``conf/backend`` names, with their classes."""
    targets = {path.stem: OmegaConf.load(path)._target_ for path in sorted((CONF / "backend").glob("*.yaml"))}
    return {name: get_class(target) for name, target in targets.items() if ".peers." in target}


def rows(optimizer: str, names: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a row for each of these peers, each of its options and precisions."""
    task = Task(partial(Mlp, 784, [64], 10), "cross_entropy", OPTIMIZERS[optimizer], BATCH, BATCH * (STEPS + 4))
    data, references = digits(0, BATCH * (STEPS + 4)).to(device), {}
    for name in names:
        cls = peers()[name]
        for options in OPTIONS.get(name, [{}]):
            for precision in cls.PRECISIONS:
                if precision not in references:
                    amp = Candidate(Amp, task, data, precision, {}, device)
                    references[precision] = examined_run("amp", amp, STEPS, noise=2)
                row = {"backend": name, "precision": precision, "optimizer": optimizer}
                row["options"] = " ".join(f"{key}={str(value).lower()}" for key, value in options.items())
                candidate = Candidate(cls, task, data, precision, options, device)
                yield {**dict.fromkeys(COLUMNS, ""), **row, **said(name, candidate, references[precision])}


def said(name: str, candidate: Candidate, reference: Run) -> dict[str, Any]:
    """Returns the verdict, and what was seen of the run."""
    try:
        run = examined_run(name, candidate, STEPS)
    except (BackendUnavailable, InputError) as error:
        return {"verdict": "unavailable", "because": str(error)}
    verdict, findings = judge_run(run, reference), run.findings
    assert findings is not None
    layers = run.recorded["module_dtypes"]
    computes = {row["computes"] for row in layers.values() if row["kind"] in ("Linear", "Called")}
    return {
        "verdict": verdict.word, "cause": verdict.cause, "detail": verdict.detail, "because": verdict.because,
        "first_scale": f"{run.steps['loss_scale'].iloc[0]:g}", "last_scale": f"{run.steps['loss_scale'].iloc[-1]:g}",
        "clip_norm": "" if findings.recipe.clip_norm is None else f"{findings.recipe.clip_norm:g}",
        "computes": "+".join(sorted(computes)),
    }  # fmt: skip


class FabricByPlugin(FabricRow):
    """``backend=fabric backend.plugin=true``, as a class of its own."""

    def __init__(self, model: Any, task: Task, precision: str, loss_scale: Any) -> None:
        super().__init__(model, task, precision, loss_scale, plugin=True)


def fill_in(file: Path, names: Sequence[str], device: torch.device, budget: float) -> None:
    """Writes times and memory of these peers into the rows with AdamW of the table in ``file``."""
    table = pd.read_csv(file, dtype=str, keep_default_na=False)
    chosen = table[table["backend"].isin(names) & (table["optimizer"] == "adamw")]
    for precision in sorted(set(chosen["precision"])):
        rows = chosen[chosen["precision"] == precision]
        raced: list[Any] = ["amp", *dict.fromkeys(rows["backend"])]
        raced += [FabricByPlugin] if any(rows["options"]) else []
        measured = sweep(raced, precision, device, budget)
        for at, row in rows.iterrows():
            name = FabricByPlugin.__name__ if row["options"] else row["backend"]
            found = measured.loc[name]
            if found["status"] != "ok":
                print(f"{name} {precision}: {found['error']}")
                continue
            ratio = ("time_vs_baseline", "time_vs_baseline_low", "time_vs_baseline_high")
            numbers = ("step_ms_p50", *ratio, "peak_memory_bytes")
            texts = [f"{found[number]:.5g}" for number in numbers[:-1]] + [f"{found[numbers[-1]]:.0f}"]
            table.loc[at, ["ms", "time_vs_amp", "time_vs_amp_low", "time_vs_amp_high", "peak_bytes"]] = texts
    table.to_csv(file, index=False, lineterminator="\n")


def sweep(backends: Sequence[Any], precision: str, device: torch.device, budget: float) -> pd.DataFrame:
    """Races the backends, and returns the table of the report by backend."""
    with tempfile.TemporaryDirectory() as folder:
        result = mpcompare.compare(
            backends=backends,
            precision=precision,
            folder=Path(folder) / "sweep",
            data="digits",
            device=device.type,
            measure={"budget_s": budget},
            **TIMED,
        )
        print(result)
        return result.table.set_index("backend")


if __name__ == "__main__":
    main()
