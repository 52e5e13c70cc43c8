"""Runs the command on networks of torchvision, timm and transformers, and keeps a row for each.

    python scripts/networks_table.py                    networks without a row, about a minute each
    python scripts/networks_table.py mnasnet1_0 ...     these networks again
    python scripts/networks_table.py --draw             the draw, name by name

The names of a library are sorted by the sha256 of a fixed word and the name. A name is taken if its network can be made
small (``drawn_networks.py``) and takes a finite step of plain PyTorch. From each file of a library only one is taken.
The draw asks nothing of mpcompare. ``TAKEN`` is what the draw found with torchvision 0.29, timm 1.0.31 and transformers
5.24.

Each network is trained by one command, ``python -m mpcompare -m backend=amp,master_weights,fp32 precision=auto,fp16``.
A row of ``docs/power/command.csv`` has, for each precision, the verdict on each backend, or the line with which its run
ended. It also has the check that came nearest to its limit, as a share of it. Checks that bound every rounding of an
element (``Check.tight``) are left out, because right values reach their limits.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import drawn_networks
import pandas as pd
import torch
import torch.nn.functional as F

from mpcompare.report.comparison import Entry
from mpcompare.report.report import contents_of

TABLE = Path(__file__).parents[1] / "docs" / "power" / "command.csv"
WORD = "networks by command"
# The number of networks, and the largest numbers of parameters and of their tensors.
WANTED = {"torchvision": (8, 4_000_000, 190), "timm": (26, 1_500_000, 130), "transformers": (26, 1_500_000, 130)}
TOGETHER = 4  # networks of one command, which take their races one after the other
TAKEN = {
    "torchvision": "shufflenet_v2_x0_5 swin_t squeezenet1_0 mnasnet1_0 densenet201 vit_l_16 mobilenet_v2 "
    "mobilenet_v3_small",
    "timm": "mambaout_kobe vit_small_patch14_dinov2 convnext_tiny resnet18d resmlp_12_224 "
    "vit_medium_patch16_rope_reg1_gap_256 poolformerv2_m36 xcit_tiny_12_p8_224 levit_256 "
    "deit_base_distilled_patch16_224 lcnet_075 pit_ti_distilled_224 test_efficientnet_ln fasternet_s "
    "test_nfnet cait_xxs24_384 beitv2_large_patch16_224 convmixer_768_32 lcnetv2_small "
    "vit_relpos_small_patch16_224 tnt_s_patch16_224 inception_next_small nest_small_jx starnet_s100 "
    "resnetv2_50t densenet264d",
    "transformers": "YosoForTokenClassification DebertaV2ForSequenceClassification BigBirdForTokenClassification "
    "MiniCPM3ForCausalLM RemBertForMaskedLM SeedOssForSequenceClassification Exaone4ForCausalLM "
    "OPTForSequenceClassification GPT2ForTokenClassification Gemma4ForCausalLM Inkling2ForCausalLM "
    "ModernBertForMaskedLM Apertus1p5TextForCausalLM SqueezeBertForMaskedLM FalconForCausalLM "
    "Qwen4ExpForCausalLM MistralForCausalLM OlmoForCausalLM BioGptForCausalLM Jais2ForCausalLM "
    "JetMoeForCausalLM Qwen2MoeForSequenceClassification DeepseekV3ForTokenClassification "
    "ConvBertForTokenClassification DiffLlamaForSequenceClassification DeepseekV4ForCausalLM",
}
MEASURED = ("timed steps",)  # the checks whose limits are of times
COMMAND = (
    *("backend=amp,master_weights,fp32", "precision=auto,fp16", "device=cpu", "task=module", "data=function"),
    *("task.model._target_=drawn_networks.make", "data._target_=drawn_networks.load", "task.batch_size=8"),
    *("train.steps=4", "train.warmup_steps=1", "measure.budget_s=0.2", "measure.block_s=0.01", "verdict.noise=1"),
    *("inference.enabled=false", "~hydra.callbacks.report"),  # its figures, not its verdicts, which are read below
)


def draw(library: str) -> Iterator[tuple[str, str]]:
    """Yields names, and why a name is not taken: an empty text where it is."""
    wanted, most, tensors = WANTED[library]
    taken: set[str] = set()
    names = drawn_networks.names_of(library)
    for name in sorted(names, key=lambda name: hashlib.sha256(f"{WORD} {name}".encode()).hexdigest()):
        try:
            reason = _why_not(library, name, taken, most, tensors)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
        if not reason:
            taken.add(drawn_networks.class_of(library, name).__module__)
        yield name, reason
        if len(taken) == wanted:
            return


def _why_not(library: str, name: str, taken: set[str], most: int, tensors: int) -> str:
    if drawn_networks.class_of(library, name).__module__ in taken:
        return "one of its file is there"
    with torch.device("meta"):
        sizes = [p.numel() for p in drawn_networks.make(library, name).parameters()]
    if sum(sizes) > most or len(sizes) > tensors:
        return f"{sum(sizes)} numbers in {len(sizes)} tensors"
    torch.manual_seed(0)
    model = drawn_networks.make(library, name)
    x, y, *_ = drawn_networks.load(0, library, name, samples=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**x) if isinstance(x, dict) else model(x)
        loss = output.loss if isinstance(x, dict) else F.cross_entropy(output.float(), y)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return "" if loss.isfinite() and all(bool(g.isfinite().all()) for g in gradients) else "not finite"


def rows_of(library: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Runs the command on some networks of a library. Yields their rows, with the verdicts of its report."""
    loss = "model" if library == "transformers" else "cross_entropy"
    with tempfile.TemporaryDirectory(prefix="networks-") as folder:
        said = _said(
            [*COMMAND, f"+task.model.library={library}", f"+data.library={library}", f"task.loss={loss}",
             f"+task.model.name={','.join(names)}", "+data.name=${task.model.name}", f"hydra.sweep.dir={folder}"],
            Path(folder) / "log",
        )  # fmt: skip
        report = contents_of([Path(folder)])
    for name in names:
        of = [each for each in report.entries if each.run.result.config["task"]["model"]["name"] == name]
        yield {"network": name, "library": library, **_cells(of, said)}


def _cells(entries: list[Entry], said: str) -> dict[str, str]:
    """Returns, by precision, what became of the runs of a network, and the check that came nearest to its limit."""
    cells: dict[str, list[str]] = {"bf16": [], "fp16": [], "fp32": []}
    nearest = [(0.0, "")]
    for entry in entries:
        backend, precision = entry.run.result.backend, entry.run.result.precision
        if precision == "auto":  # the run ended before its precision was known
            precision = "fp32" if backend == "fp32" else "bf16"
        if (backend == "fp32") != (precision == "fp32"):  # fp32 takes no part in 16 bits
            continue
        if (verdict := entry.verdict) is None:
            cells[precision].append(f"{backend}: {entry.error}"[:280])
            continue
        cells[precision].append(f"{backend} {verdict}"[:280])
        for check in verdict.checks:
            if check.limit and not check.tight and check.kind not in MEASURED:
                share = check.value / check.limit
                nearest.append((share, f"{check.kind} of {backend} {precision}, {share:.2f}"))
    row = {precision: ", ".join(texts) or f"not started: {said}"[:280] for precision, texts in cells.items()}
    return {**row, "nearest to its limit": max(nearest)[1]}


def _said(overrides: Iterable[str], log: Path) -> str:
    """Runs the command with one thread a process. Returns its last line."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "200"}
    with log.open("w") as lines:
        subprocess.run([sys.executable, "-m", "mpcompare", "-m", *overrides], env=environment, stdout=lines,
                       stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    return (log.read_text(errors="replace").strip().splitlines() or [""])[-1]


def put(row: dict[str, Any]) -> None:
    """Writes a row into the table, in the place of an older one of its network. Rows are in the order of the draw."""
    order = [name for names in TAKEN.values() for name in names.split()]
    rows = {each["network"]: each for each in _rows()} | {row["network"]: row}
    pd.DataFrame([rows[name] for name in order if name in rows]).to_csv(TABLE, index=False)


def _rows() -> list[Any]:
    return pd.read_csv(TABLE, keep_default_na=False).to_dict("records") if TABLE.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of networks (default: networks without a row)")
    parser.add_argument("--draw", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.draw:
        for library in WANTED:
            for name, reason in draw(library):
                print(f"{library} {name}: {reason or 'taken'}", flush=True)
        return
    there = {row["network"] for row in _rows()}
    for library, taken in TAKEN.items():
        names = [each for each in taken.split() if each not in there]
        if asked.names:
            names = [each for each in taken.split() if each in asked.names]
        for some in (names[first : first + TOGETHER] for first in range(0, len(names), TOGETHER)):
            for row in rows_of(library, some):
                put(row)
                print(" | ".join(map(str, row.values())), flush=True)


if __name__ == "__main__":
    main()
