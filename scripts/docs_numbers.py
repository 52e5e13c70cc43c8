"""Writes the numbers into README and docs, from files that are kept in docs/, and the checks from their code.

    python scripts/docs_numbers.py [--check]

A place for numbers begins with ``<!-- numbers: NAME FILE -->`` and ends with ``<!-- end -->``. This program writes the
lines between. NAME is one of ``NUMBERS``, and FILE is the file or folder from which the place is made, seen from docs/.
The checks need no FILE.

With ``--check`` nothing is written. The exit code is 1 if a page does not show what its files say, or if a number that
looks measured stands elsewhere: a percentage, a time, a size in bytes, or "N of M". So say a limit or a setting in
words, as a fraction or as code. Then a number with a unit is always one that a file holds.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from real_bug_tables import bugs, draws, since, themes, unnamed
from summaries import MB, markdown, time_ratio
from watched_bug_tables import twinned_draw, watched_bugs

from mpcompare.command.listing import lines_of
from mpcompare.verdict.judge.check import listed
from mpcompare.verdict.judge.kinds import KINDS, file_of

ROOT = Path(__file__).parents[1]  # the tree of this file, whichever mpcompare is installed
PLACE = re.compile(r"(<!-- numbers: (\w+)(?: ([\w./-]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
UNREAD = re.compile(
    r"<!-- numbers: .*?<!-- end -->|<!--.*?-->|^ *```.*?^ *```|`[^`\n]+`|\]\([^)\n]*\)", re.DOTALL | re.MULTILINE
)
UNITS = "%|[nuµm]s|s|seconds?|minutes?|hours?|[kKMGT]i?B|bytes"
MEASURED = re.compile(rf"(?!95 %)\b\d[\d.,]*(?: ?(?:{UNITS})(?!\w)| of (?:the |all )?\d)")  # intervals are of 95 %
DISTANCE = "max_abs_loss_diff_vs_baseline"
FAMILIES = {
    "mlp": "MLP, fp16 and bf16",
    "cnn": "CNN with batch norm, bf16",
    "lstm": "LSTM, bf16",
    "gpt": "transformer, bf16",
    "recipe": "recipe, fp16 and bf16",
    "trained": "wrong after 10 of 20 steps, fp16 and bf16",
    "dropout": "dropout and checkpoints, bf16",
    "groups": "parameter groups, fp16 and bf16",
    "branches": "branches, fp16 and bf16",
    "masked": "masked labels, bf16",
}


def output(file: Path) -> str:
    """Returns what a program printed."""
    return f"```\n{file.read_text().rstrip()}\n```"


def text(file: Path) -> str:
    """Returns lines of Markdown as they are kept."""
    return file.read_text().rstrip()


def runs(file: Path) -> str:
    """Returns a row for each run of a sweep, from its summary: the three answers."""
    summary = pd.read_csv(file)
    of = summary["run"].map(summary.set_index("run")["backend"])
    baseline = of[summary["run"] == summary["baseline"]].iloc[0]
    table = {
        "backend": _names(summary),
        "verdict": summary["verdict"],
        "ms a step": summary["step_ms_p50"],
        f"time / `{baseline}`": [time_ratio(row) for _, row in summary.iterrows()],
        "peak MB": summary["peak_memory_bytes"] / MB,
        "model MB": summary["peak_memory_bytes_analytic"] / MB,
        f"farthest loss from `{baseline}`'s": [f"{far:.1e}" if far else "0" for far in summary[DISTANCE]],
        "test accuracy": summary["test_accuracy"],
    }
    return markdown(pd.DataFrame(table))


def phases(file: Path) -> str:
    """Returns the time of each phase in ms, from the summary of a sweep."""
    summary = pd.read_csv(file)
    names = ("forward", "backward", "unscale", "clip", "step", "update")
    table = pd.DataFrame({"backend": _names(summary)} | {name: summary[f"phase_{name}_ms"] for name in names})
    table["first step"] = summary["first_step_ms"]
    return markdown(table.dropna(axis="columns", how="all"))


def inference(file: Path) -> str:
    """Returns a row for each run and way of inference; the times stand at the first run, where they were measured."""
    kept = pd.read_csv(file)
    columns = {
        "backend": kept["label"],
        "in": kept["way"],
        "test accuracy": kept["test_accuracy"],
        "ms a batch": kept["latency_ms"],
        "time / `fp32`": [f"{ratio:.2f}" for ratio in kept["time_vs_fp32"]],
        "peak MB": kept["peak_memory_bytes"] / MB,
        "weights MB": kept["weight_bytes"] / MB,
    }
    table = pd.DataFrame(columns)
    table.loc[kept["run"] != kept["run"].iloc[0], list(columns)[3:]] = None
    return markdown(table)


def speed(folder: Path) -> str:
    """Returns the command of a sweep and a row for each run, from ``folder/vs_BASELINE.csv``, its summary compared with
    each baseline."""
    beside = {path.stem.removeprefix("vs_"): pd.read_csv(path) for path in sorted(folder.glob("vs_*.csv"))}
    summary = next(iter(beside.values()))
    table = {
        "backend": _names(summary),
        "ms a step": summary["step_ms_p50"],
        "p20 to p80": [
            "" if pd.isna(low) else f"{low:.4g} to {high:.4g}"
            for low, high in summary[["step_ms_p20", "step_ms_p80"]].to_numpy()
        ],
        **{f"time / `{name}`": [time_ratio(row) for _, row in of.iterrows()] for name, of in beside.items()},
        "peak MB": summary["peak_memory_bytes"] / MB,
        "verdict": summary["verdict"],
    }
    return f"`{(folder / 'command.txt').read_text().strip()}`\n\n{markdown(pd.DataFrame(table))}"


def products(file: Path) -> str:
    """Returns the matrix products of ``bench_ops.py``, a row each, with a column for each dtype."""
    kept = pd.read_csv(file)

    def cell(row: "pd.Series[float]") -> str:
        torch = "" if pd.isna(row["torch / ours"]) else f", {row['torch / ours']:.3g} x torch"
        return f"{row['ms']:.3g} ms, {row['GFLOP/s']:.0f} GFLOP/s, {100 * row['share of peak']:.0f} % of peak{torch}"

    kept["cell"] = [cell(row) for _, row in kept.iterrows()]
    table = kept.pivot_table(index="shape", columns="dtype", values="cell", aggfunc="first", sort=False)
    return markdown(table[list(dict.fromkeys(kept["dtype"]))].reset_index().rename(columns={"shape": "product"}))


def foretold(file: Path) -> str:
    """Returns the networks of ``foretold_memory.py``, with the memory of their examinations, and a sentence on them."""
    kept = pd.read_csv(file)
    ratio = kept["foretold / measured"]
    off = (ratio - 1).abs()
    table = {
        "network": kept["network"],
        "parameters, MB": kept["parameters_bytes"] / MB,
        "foretold, MB": kept["foretold_bytes"] / MB,
        "measured, MB": kept["peak_bytes"] / MB,
        "foretold / measured": [f"{each:.2f}" for each in ratio],
        "measured / parameters": [f"{each:.1f}" for each in kept["measured / parameters"]],
    }
    within = f"{(off <= 0.2).sum()} of {len(off)} are foretold within 20 %; the worst is {100 * off.max():.0f} % off."
    return f"{markdown(pd.DataFrame(table))}\n\n{within}"


def planted(file: Path) -> str:
    """Returns a row for each planted bug and precision, with the number of failed checks of each kind that failed."""
    table = pd.read_csv(file, dtype=str)
    failed = table[[kind for kind in KINDS if kind in table]].apply(lambda row: row.dropna().items(), axis=1)
    columns = {
        f"planted bug ({file.stem.partition('_')[2]})": table["bug"],
        "precision": table["precision"],
        "verdict": table["verdict"],
        "failed checks": [", ".join(f"{kind} {number}" for kind, number in each) for each in failed],
    }
    return markdown(pd.DataFrame(columns))


def power(folder: Path) -> str:
    """Returns a row for each family of planted bugs: how many there are, and how many are flagged and named."""
    rows = []
    for family, title in FAMILIES.items():
        table = pd.read_csv(folder / f"planted_{family}.csv", dtype=str)
        seen = table[table["invisible"].isna()]
        flagged = seen["verdict"].str.startswith("differs")
        named = seen["verdict"].str.partition(" (")[0] == "differs: " + seen["cause"]
        rows.append((title, table["bug"].nunique(), len(seen), flagged.sum(), named.sum()))
    return markdown(pd.DataFrame(rows, columns=["family", "bugs", "visible rows", "flagged", "named"]))


def forced(file: Path) -> str:
    """Returns a row for each network and precision under the forced replay: what is seen, how near right values come
    to their limits, and where the reference itself is beyond roundings."""
    kept = pd.read_csv(file, dtype=str, keep_default_na=False)
    rows = []
    for _, row in kept.iterrows():
        used = int(row["parameters"]) - int(row["unused"])
        blind = row["not seen"].split(", ") if row["not seen"] else []
        itself = row["amp itself"].partition(", beyond")[0]
        rows.append(
            {
                "network": row["network"],
                "library": row["library"],
                "precision": row["precision"],
                "gradients seen": f"{row['seen']} of {used}",
                "not seen": listed([f"`{name}`" for name in blind]) if blind else "",
                "resolution": f"{100 * float(row['resolution']):.2g} %",
                "`amp` alone": row["amp alone"],
                "`master_weights`": row["master_weights"],
                "`amp` itself": itself.replace(" in the first step is itself", ":"),
                "accused": row["accused"] or "no",
                "s": row["seconds"],
            }
        )
    return markdown(pd.DataFrame(rows))


def mutations(file: Path) -> str:
    """Returns a row for each kind of mutation, and one for all: how many were tried, flagged and named, and how many
    of the unflagged ones have a smaller error than two roundings."""
    kept = pd.read_csv(file, keep_default_na=False)
    kept["small"] = [sum(effect < 2 for _, effect in _places(text)) for text in kept["not flagged"]]
    counts = ["tried", "flagged", "named", "small"]
    table = kept.groupby("mutation", sort=False)[counts].sum()
    table.insert(0, "networks", kept.groupby("mutation", sort=False)["network"].nunique())
    table.loc["all"] = [kept["network"].nunique(), *table[counts].sum()]
    for name in ("flagged", "named"):
        table[name] = [f"{n} ({100 * n / tried:.1f} %)" for n, tried in zip(table[name], table["tried"], strict=True)]
    return markdown(table.rename(columns={"small": "not flagged, below two roundings"}).reset_index())


def missed(file: Path) -> str:
    """Returns a row for each mutation that was not flagged, with its largest error in units of what roundings make; and
    for each whose layer was not named, with what was said."""
    rows = []
    for _, row in pd.read_csv(file, dtype=str, keep_default_na=False).iterrows():
        told = [(place, f"not flagged, {effect:.1f} roundings") for place, effect in _places(row["not flagged"])]
        told += [tuple(each.split(": ", 1)) for each in row["not named"].split("; ") if ": " in each]
        rows += [(row["network"], row["precision"], row["mutation"], f"`{place}`", said) for place, said in told]
    return markdown(pd.DataFrame(rows, columns=["network", "precision", "mutation", "place", "said"]))


def _places(text: str) -> list[tuple[str, float]]:
    parts = (each.rpartition(": ") for each in text.split("; ") if each)
    return [(place, float(effect)) for place, _, effect in parts]


def peers(file: Path) -> str:
    """Returns a row for each peer and precision, from the table of ``peers.py``: the verdicts, what was seen, and the
    times, where they were measured."""
    kept = pd.read_csv(file, dtype=str, keep_default_na=False)
    rows = []
    for (name, options, precision), of in kept.groupby(["backend", "options", "precision"], sort=False):
        by = {row["optimizer"]: row for _, row in of.iterrows()}
        seen = by["adamw"]
        scales = dict.fromkeys((seen["first_scale"], seen["last_scale"]))
        timed = {"ms a step": "", "time / `amp`": "", "peak MB": ""}
        if seen["ms"]:
            numbers = ("ms", "time_vs_amp", "time_vs_amp_low", "time_vs_amp_high")
            ms, of_amp, *interval = (f"{float(seen[name] or 'nan'):.2f}" for name in numbers)
            ratio = f"{of_amp} ({' to '.join(interval)})" if "nan" not in interval else of_amp
            peak = f"{float(seen['peak_bytes']) / MB:.4g}"
            timed = {"ms a step": ms, "time / `amp`": ratio, "peak MB": peak}
        rows.append(
            {
                "backend": f"`{name}`, `{options}`" if options else f"`{name}`",
                "precision": precision,
                "with momentum": _said(by["momentum"]),
                "with AdamW": "the same" if _said(by["momentum"]) == _said(seen) != "same" else _said(seen),
                "loss scale, first and last": ", ".join(scales) if any(each != "1" for each in scales) else "none",
                "clips to": seen["clip_norm"],
                "layers compute in": seen["computes"] or "not seen",
                **timed,
            }
        )
    shown = pd.DataFrame(rows)
    return markdown(shown.drop(columns=[name for name in shown if (shown[name] == "").all()]))


def _said(row: "pd.Series[str]") -> str:
    if row["verdict"] == "unavailable":
        return "no such optimizer"
    detail = f" ({row['detail']})" if row["detail"] else ""
    return f"{row['verdict']}: {row['cause']}{detail}" if row["cause"] else row["verdict"]


def table(file: Path) -> str:
    """Returns a table as it is kept."""
    return markdown(pd.read_csv(file, dtype=str, keep_default_na=False))


def options(folder: Path) -> str:
    """Returns a row for each option of a group of conf/, with what its file says of itself."""
    lines = lines_of(folder.name, [folder.parent])
    return markdown(pd.DataFrame({folder.name: [f"`{name}`" for name in lines], "what it is": list(lines.values())}))


def questions(_: Path) -> str:
    """Returns a row for each check, with the first line of its file."""
    return markdown(pd.DataFrame([_of_check(kind)[:2] for kind in KINDS], columns=["check", "question"]))


def checks(_: Path) -> str:
    """Returns a section for each check, with what its file says of its value and its limit."""
    return "\n\n".join(f"## {kind}\n\n{_of_check(kind)[2]}" for kind in KINDS)


def _of_check(kind: str) -> tuple[str, str, str]:
    """Returns a link to the section of a check, its question, and its text, from the docstring of its file."""
    question, _, text = (file_of(KINDS[kind]).__doc__ or "").strip().partition("\n\n")
    return f"[{kind}](checks.md#{kind.replace(' ', '-')})", question, text


OF_PAGES = (
    output,
    watched_bugs,
    twinned_draw,
    runs,
    text,
    phases,
    inference,
    speed,
    products,
    foretold,
    planted,
    power,
    forced,
    mutations,
    missed,
    peers,
    table,
    checks,
    questions,
    options,
)
OF_REAL_BUGS = (draws, themes, unnamed, since, bugs)
NUMBERS: dict[str, Callable[[Path], str]] = {each.__name__: each for each in (*OF_PAGES, *OF_REAL_BUGS)}


def _names(summary: pd.DataFrame) -> list[str]:
    return [f"`{name}` {precision}" for name, precision in summary[["backend", "precision"]].to_numpy()]


def written(text: str, docs: Path) -> str:
    """Returns the text of a page with the numbers that ``docs`` holds, in each of its places."""

    def fill(place: re.Match[str]) -> str:
        start, name, file, end = place.groups()
        if name not in NUMBERS:
            raise ValueError(f"numbers: {name}: expected one of {', '.join(NUMBERS)}")
        return f"{start}{NUMBERS[name](docs / (file or ''))}\n{end}"

    return PLACE.sub(fill, text)


def measured(text: str) -> list[str]:
    """Returns the numbers in the prose of a page that look measured, each with its line."""
    prose = UNREAD.sub(lambda unread: re.sub(r"[^\n]", "~", unread.group()), text)
    return [f"line {prose.count(chr(10), 0, found.start()) + 1}: {found.group()}" for found in MEASURED.finditer(prose)]


def pages() -> list[Path]:
    """Returns the README and the pages in docs/, except the pages that keep_results.py makes."""
    return [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "results" not in p.parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    old: list[str] = []
    found: list[str] = []
    for page in pages():
        text = page.read_text()
        try:
            new = written(text, ROOT / "docs")
        except (OSError, KeyError, ValueError) as error:
            sys.exit(f"{page.name}: {error}")
        if new != text:
            old.append(page.name)
            if not check:
                page.write_text(new)
        found += [f"{page.name}, {number}" for number in measured(text)]
    print(f"{'differ' if check else 'written'}: {', '.join(old) or 'no page'}")
    for number in found:
        print(f"{number}: measured? expected a place that a file fills, or words")
    sys.exit(1 if check and old + found else 0)


if __name__ == "__main__":
    main()
