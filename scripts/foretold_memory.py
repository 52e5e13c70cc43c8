"""Compares the memory that an examination was foretold to take with the memory that it took, on many networks.

    python scripts/foretold_memory.py [--out FILE] [NAME...]

Each network is a run of its own, of few steps. The file has a row for each: bytes of the parameters, foretold and
measured, and their ratios. Rows of networks that are not named stay. Five of the networks were looked at when the
counts were made: ``lstm``, ``gpt, many tokens``, ``gpt, fp32`` and the two of 300 MB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import OmegaConf

from mpcompare.command.nodes import task_of

FEW = (
    "train.steps=2 train.warmup_steps=1 measure.budget_s=0.1 measure.block_s=0.01 inference.enabled=false "
    "verdict.noise=1 hydra.output_subdir=null"
)
CASES = {
    "cnn, bf16": "backend=amp task=cifar10_cnn task.model.width=24 task.batch_size=64",
    "gpt, few tokens": "backend=amp task=char_gpt optimizer=adamw task.model.width=448 task.model.blocks=3 "
    "data.length=24 task.batch_size=4",
    "gpt, many tokens": "backend=master_weights task=char_gpt task.model.width=96 data.length=160 task.batch_size=12",
    "lstm": "backend=fp32 task=text_lstm task.model.width=256 task.batch_size=16",
    "mlp, fp16": "backend=scratch precision=fp16 task.model.hidden=[2000,2000] task.batch_size=64",
    "cnn, fp32": "backend=fp32 task=cifar10_cnn optimizer=adamw task.model.width=12 task.batch_size=32",
    "mlp, adamw": "backend=amp optimizer=adamw task.model.hidden=[1000,2500,600] task.batch_size=48",
    "mlp, many rows": "backend=fp32 optimizer=sgd task.model.hidden=[128,128] task.batch_size=4096",
    "gpt, bf16 weights": "backend=bf16_weights task=char_gpt optimizer=adamw task.model.width=320 task.batch_size=4",
    "mlp, micro-batches": "backend=master_weights task.model.hidden=[1500,1500] task.batch_size=256 task.accumulate=4 "
    "task.clip_norm=1",
    "cnn, mnist, fp16": "backend=amp precision=fp16 task=mnist_cnn",
    "lstm, two layers": "backend=amp task=text_lstm optimizer=adamw task.model.width=384 task.model.layers=2 "
    "task.batch_size=8",
    "lstm, many rows": "backend=amp task=text_lstm task.model.width=96 task.batch_size=128",
    "gpt, tied": "backend=amp task=char_gpt optimizer=adam task.model.tied=true task.model.width=256 "
    "task.model.blocks=2 task.batch_size=24",
    "gpt, fp32": "backend=fp32 task=char_gpt task.model.width=192 task.model.blocks=4 task.batch_size=6",
    "mlp, one layer": "backend=master_weights optimizer=adamw task.model.hidden=[3000] task.batch_size=32",
    "mlp, six layers": "backend=scratch task.model.hidden=[700,700,700,700,700,700] task.batch_size=128",
    "mlp, bf16 states": "backend=bf16_states optimizer=adamw task.model.hidden=[2500,2500] task.batch_size=512",
    "mlp, recipe": "backend=fp32 task=recipe_mlp task.model.in_features=1024 task.model.hidden=[1024] "
    "task.model.out_features=1024",
    "cnn, few rows": "backend=master_weights task=cifar10_cnn optimizer=sgd task.model.width=40 task.batch_size=16",
    "gpt, 300 MB, adamw": "backend=amp task=char_gpt optimizer=adamw task.model.width=1024 task.model.blocks=6 "
    "task.model.heads=8 task.batch_size=4",
    "mlp, 300 MB": "backend=amp task.model.hidden=[8000,7700] task.batch_size=64",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of networks: {', '.join(CASES)}", metavar="NAME")
    parser.add_argument("--out", type=Path, help="CSV file, written after each network", metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CASES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    rows: dict[str, dict[Any, Any]] = {}
    if args.out and args.out.exists():
        rows = {row["network"]: row for row in pd.read_csv(args.out).to_dict("records")}
    for number, name in enumerate(args.names or CASES):
        rows[name] = {"network": name, "overrides": CASES[name], **examined(CASES[name])}
        row = pd.DataFrame([rows[name]]).drop(columns="overrides")
        print(row.to_string(header=not number, index=False), flush=True)
        table = pd.DataFrame([rows[each] for each in CASES if each in rows])
        if args.out:
            table.to_csv(args.out, index=False)
    off = (table["foretold / measured"] - 1).abs()
    print(f"{(off <= 0.2).sum()} of {len(off)} are foretold within 20 %; the worst is off by {100 * off.max():.0f} %")


def examined(overrides: str) -> dict[str, float]:
    """Returns the bytes of the parameters and of one examination, and their ratios."""
    with tempfile.TemporaryDirectory(prefix="mpcompare-") as folder:
        command = [sys.executable, "-m", "mpcompare", *f"{overrides} {FEW}".split(), f"hydra.run.dir={folder}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    model = task_of(OmegaConf.create(result["config"]["task"])).new_model(0, torch.device("cpu"))
    params = sum(p.nbytes for p in model.parameters())
    foretold, peak = result["examine_foretold_bytes"], result["examine_peak_bytes"]
    ratios = {"foretold / measured": round(foretold / peak, 3), "measured / parameters": round(peak / params, 2)}
    return {"parameters_bytes": params, "foretold_bytes": foretold, "peak_bytes": peak, **ratios}


if __name__ == "__main__":
    main()
