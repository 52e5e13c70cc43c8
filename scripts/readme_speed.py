"""Prints the README's tables of speed from the summaries that docs_figures.sh has kept of its sweeps.

python scripts/readme_speed.py docs/speed/8192 [docs/speed/2048 ...]
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
from summaries import MB, markdown, times_baseline


def table(folder: Path) -> pd.DataFrame:
    """Returns a row for each run of a sweep, from ``folder/vs_BASELINE.csv``, its summary beside each baseline."""
    beside = {path.stem.removeprefix("vs_"): pd.read_csv(path) for path in sorted(folder.glob("vs_*.csv"))}
    runs = next(iter(beside.values()))
    columns = {
        "backend": [f"`{name}` {p}" for name, p in runs[["backend", "precision"]].to_numpy()],
        "ms a step": runs["step_ms_p50"],
        "p20 to p80": [
            "" if pd.isna(low) else f"{low:.4g} to {high:.4g}"
            for low, high in runs[["step_ms_p20", "step_ms_p80"]].to_numpy()
        ],
        **{f"x `{name}`": [times_baseline(row) for _, row in of.iterrows()] for name, of in beside.items()},
        "peak MB": runs["peak_memory_bytes"] / MB,
        "verdict": runs["verdict"],
    }
    return pd.DataFrame(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", metavar="docs/speed/NAME")
    for sweep in parser.parse_args().sweeps:
        if not (sweep / "command.txt").exists():
            sys.exit(f"{sweep}: not a folder that scripts/docs_figures.sh has written")
        print(f"`{(sweep / 'command.txt').read_text().strip()}`\n\n{markdown(table(sweep))}\n")


if __name__ == "__main__":
    main()
