"""Measures the cost of watching: GPT-2 with 124 M parameters, from its configuration, in bf16 on a CPU.

    python scripts/watch_cost.py                     # pairs of a plain and a watched process, in turns

It prints the time of a step and the peak of the memory that is not backed by a file, plain and watched, and their
ratios. It also prints the time of the comparison when the block ends. ``--csv`` adds all to a table. It needs
transformers.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd


def memory() -> int:
    """Returns the bytes of the process that are in memory and belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def child(watched: bool, steps: int, rows: int, tokens: int, examined: bool) -> dict[str, Any]:
    """Trains; returns the seconds of each step, and the peak of the memory."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import mpcompare

    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config()).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    seconds: list[float] = []
    peak, running = [0], [True]

    def sample() -> None:
        while running:
            peak[0] = max(peak[0], memory())
            time.sleep(0.02)

    threading.Thread(target=sample, daemon=True).start()
    watch = mpcompare.watch(net, optimizer, steps=steps if watched else 1)
    if watched:
        watch.__enter__()
    for _ in range(steps):
        began = time.perf_counter()
        x = torch.randint(50257, (rows, tokens))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    running.clear()
    found: dict[str, Any] = {"seconds": seconds, "peak": peak[0]}
    if watched and examined:
        began = time.perf_counter()
        watch.__exit__(None, None, None)
        found |= {"examined": time.perf_counter() - began, "said": str(watch)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the cost of watching.")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--examine", action="store_true", help="compare what was seen, too, once")
    parser.add_argument("--csv", type=Path, help="a table that gets one more row")
    parser.add_argument("--copies", default="on a disk", help="where TMPDIR lies, in words, for the row")
    parser.add_argument("--child", choices=["plain", "watched", "examined"])
    args = parser.parse_args()
    if args.child:
        examined = args.child == "examined"
        print(json.dumps(child(args.child != "plain", args.steps, args.rows, args.tokens, examined)))
        return
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "watched": []}
    for pair in range(args.pairs):
        for kind in ("plain", "watched"):
            examined = args.examine and kind == "watched" and pair == args.pairs - 1
            command = [sys.executable, *sys.argv, "--child", "examined" if examined else kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind].append(json.loads(done.stdout.splitlines()[-1]))
    times = {kind: median(median(each["seconds"][1:]) for each in runs) for kind, runs in found.items()}
    peaks = {kind: max(each["peak"] for each in runs) for kind, runs in found.items()}
    ratio = {"step": times["watched"] / times["plain"], "memory": peaks["watched"] / peaks["plain"]}
    gib = {kind: peak / 2**30 for kind, peak in peaks.items()}
    print(f"a step: {times['plain']:.2f} s, watched {times['watched']:.2f} s, {ratio['step']:.2f} times")
    print(f"memory: {gib['plain']:.2f} GiB, watched {gib['watched']:.2f} GiB, {ratio['memory']:.2f} times")
    last = found["watched"][-1]
    if args.csv:
        row: dict[str, Any] = {
            "tokens in a step": f"{args.rows} x {args.tokens}", "copies": args.copies,
            "plain (s)": round(times["plain"], 2), "watched (s)": round(times["watched"], 2),
            "times": round(ratio["step"], 2), "plain (GiB)": round(gib["plain"], 2),
            "watched (GiB)": round(gib["watched"], 2), "times the memory": round(ratio["memory"], 2),
            "compared (s)": round(last["examined"]) if args.examine else None,
        }  # fmt: skip
        pd.DataFrame([row]).to_csv(args.csv, mode="a", header=not args.csv.exists(), index=False)
    if args.examine:
        print(f"compared at the end: {last['examined']:.0f} s\n{last['said']}")


if __name__ == "__main__":
    main()
