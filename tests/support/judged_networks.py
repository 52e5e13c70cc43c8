"""Verdicts on networks that others wrote, and the table of them in docs/networks_of_others.md."""

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pandas as pd
import torch
from support.backends import BACKENDS
from support.foreign import NETWORKS, STEPS, Network
from support.judging import examined
from torch import Tensor

from mpcompare.backends.amp_compile import AmpCompile
from mpcompare.backends.fp32 import Fp32
from mpcompare.loss_scale import NoLossScale
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.draws import with_shared_masks
from mpcompare.verdict.judge.verdict import Verdict

COMPILE_S = 180.0  # the longest first step of a network that is also compiled


class OtherOrder(Fp32):
    """``fp32`` that takes the rows of each batch from the last to the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.flip(0), y.flip(0))


def judged(network: Network, precision: str, compiled: bool) -> Iterator[tuple[str, Verdict]]:
    """Yields the verdict on ``amp``, or on ``fp32``, and on each other backend of the precision compared with it."""
    others = {"master_weights": BACKENDS["master_weights"]} if precision != "fp32" else {"other order": OtherOrder}
    if compiled and precision != "fp32":
        others["amp_compile"] = AmpCompile
    reference, data = "fp32" if precision == "fp32" else "amp", network.dataset
    beside = examined(reference, BACKENDS[reference], network.task, data, precision, steps=STEPS, noise=2)
    yield reference, judge_run(beside, beside)
    for name, backend in others.items():
        yield name, judge_run(examined(name, backend, network.task, data, precision, steps=STEPS), beside)


def compiles(network: Network) -> str:
    """Returns why a network is not compared under ``amp_compile``: it takes longer than ``COMPILE_S`` to compile, or
    cannot be compiled; empty where it is compared."""
    processes = multiprocessing.get_context("spawn")  # a compilation can be stopped from outside only
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=_compile, args=(network.name, there))
    process.start()
    there.close()
    try:
        return str(here.recv()) if here.poll(COMPILE_S) else f"compiles for more than {COMPILE_S:.0f} s"
    except EOFError:
        return "its compilation died"
    finally:
        process.kill()
        process.join()


def _compile(name: str, result: Connection) -> None:
    """Takes the first forward and backward of a network, and sends the error that it stops with, if any."""
    torch.set_num_threads(1)
    network = next(network for network in NETWORKS if network.name == name)
    batch = [t[: network.task.batch_size] for t in (network.dataset.x_train, network.dataset.y_train)]
    model = network.task.new_model(0, torch.device("cpu"))
    try:
        for each in {id(m): m for m in (model, with_shared_masks(model))}.values():
            backend = AmpCompile(each, network.task, "bf16", NoLossScale())
            backend.forward(*batch)
            backend.backward()
    except Exception as error:
        result.send(f"cannot be compiled whole ({type(error).__name__})")
    else:
        result.send("")


def nearest(verdicts: Sequence[Verdict]) -> str:
    """Returns the kind of the check that comes nearest to its limit, and the share of its limit. A right update comes
    to its bound, which is the bound of its roundings, and tells nothing."""
    checks = [c for v in verdicts for c in v.checks if c.limit and not c.tight]
    check = max(checks, key=lambda c: c.value / c.limit)
    return f"{check.kind}, {check.value / check.limit:.2f}"


def row_of(network: Network, compiled: bool = False) -> dict[str, str]:
    """Returns the row of a network: its tensors, the backends that trained it, and their verdicts.

    Args:
        compiled: whether it is also compared under ``amp_compile``, in bf16.
    """
    made = network.task.new_model(0, torch.device("cpu"))
    tensors = [*made.parameters(), *made.buffers()]
    why_not = compiles(network) if compiled else ""
    found = {
        (name, precision): verdict
        for precision in (*network.precisions, "fp32")
        for name, verdict in judged(network, precision, compiled and not why_not and precision == "bf16")
    }
    accused = {key: v for key, v in found.items() if v.word not in ("same", "not seen", "reference")}
    backends: dict[str, list[str]] = {}
    for name, precision in found:
        backends.setdefault(precision, []).append(name)
    tried = [f"{precision}: {', '.join(names)}" for precision, names in backends.items()]
    return {
        "network": network.name,
        "library": network.library,
        "tensors": f"{len(tensors)} ({sum(t.numel() for t in tensors):,} numbers)",
        "backends": "; ".join([*tried, *([f"amp_compile {why_not}"] if why_not else [])]),
        "verdict": "; ".join(f"{name} {precision} {v}" for (name, precision), v in accused.items()) or "same",
        "nearest to its limit": nearest(list(found.values())),
    }


def write(rows: Sequence[dict[str, str]], file: Path) -> None:
    """Writes the rows into the table, in the order of ``NETWORKS``, in place of older ones of the same networks."""
    kept = pd.read_csv(file, dtype=str).to_dict("records") if file.exists() else []
    by_name = {row["network"]: row for row in (*kept, *rows)}
    pd.DataFrame([by_name[n.name] for n in NETWORKS if n.name in by_name]).to_csv(file, index=False)
