"""Compares the memory that an examination was foretold to take with the memory that it took, on many networks.

    python scripts/foretold_memory.py [--out FILE] [NAME...]

Each network is a run of its own, of few steps. The file has a row for each: bytes of the parameters, foretold and
measured, and their ratio. None of these networks was looked at when the coefficients were found.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of networks: {', '.join(CASES)}", metavar="NAME")
    parser.add_argument("--out", type=Path, help="CSV file, written after each network")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CASES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    rows = []
    for name in args.names or CASES:
        rows.append({"network": name, "overrides": CASES[name], **examined(CASES[name])})
        table = pd.DataFrame(rows)
        print(table.drop(columns="overrides").tail(1).to_string(header=len(rows) == 1, index=False), flush=True)
        if args.out:
            table.to_csv(args.out, index=False)
    off = (table["foretold / measured"] - 1).abs()
    print(f"{(off <= 0.2).sum()} of {len(off)} are foretold within 20 %; the worst is off by {100 * off.max():.0f} %")


def examined(overrides: str) -> dict[str, float]:
    """Returns the bytes of one examination, and their ratio."""
    with tempfile.TemporaryDirectory(prefix="mpcompare-") as folder:
        command = [sys.executable, "-m", "mpcompare", *f"{overrides} {FEW}".split(), f"hydra.run.dir={folder}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    foretold, peak = result["examine_foretold_bytes"], result["examine_peak_bytes"]
    return {"foretold_bytes": foretold, "peak_bytes": peak, "foretold / measured": round(foretold / peak, 3)}


if __name__ == "__main__":
    main()
