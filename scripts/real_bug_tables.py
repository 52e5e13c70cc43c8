"""The tables of docs/real_bugs.md, from the files of ``tests/power.py real`` in docs/real_bugs/.

``DRAW.csv`` has the bugs of a draw, judged by the verdict that was frozen before the draw. ``DRAW_mended.csv`` has the
same bugs, judged by the mended verdict. ``reasons.csv`` says in words why a bug is missed or has another name in a
table, and in a mended table what finds the bug. Its rows have the table and the id of the bug.
"""

from functools import cache
from pathlib import Path

import pandas as pd
from summaries import markdown

DRAWS = {"first": "first", **{name: f"{name}_draw" for name in ("second", "third", "fourth", "fifth")}}
OUTCOME = ["verdict", "cause", "named"]


def draws(folder: Path) -> str:
    """Returns a row for each draw: how many of its bugs the frozen verdict flags and names, how many right entrants it
    accuses, and how many bugs the mended verdict flags and names."""
    kept = {name: folder / f"{stem}.csv" for name, stem in DRAWS.items()}
    tables = {name: (_read(file), _since(file)) for name, file in kept.items()}
    later = [tables[name] for name in kept if name != "first"]
    tables["all but the first"] = (pd.concat([before for before, _ in later]), pd.concat([since for _, since in later]))
    rows = []
    for name, (table, since) in tables.items():
        right = table["theme"] == "correct"
        bugs = table[~right]
        flagged, fair = _counts(bugs)
        rows.append(
            {
                "draw": name,
                "repositories": bugs["link"].str.split("/").str[3:5].str.join("/").nunique(),
                "bugs": len(bugs),
                "flagged": f"{flagged} ({100 * flagged / len(bugs):.0f} %)",
                "with a fair cause": fair,
                "right ones accused": f"{_yes(table[right], 'flagged')} of {right.sum()}",
                **dict(zip(("flagged since", "fair since"), _counts(since[~right]), strict=True)),
            }
        )
    return markdown(pd.DataFrame(rows))


def themes(file: Path) -> str:
    """Returns a row for each theme and precision of a draw: how many bugs are flagged and named, then and since."""
    table = _read(file)
    bugs = table[table["theme"] != "correct"]
    since = _since(file).loc[bugs.index]
    parts = {theme: bugs["theme"] == theme for theme in bugs["theme"].unique()}
    parts |= {f"in {precision}": bugs["precision"] == precision for precision in ("fp16", "bf16")}
    parts["all"] = bugs["theme"] != "correct"
    rows = [(name, of.sum(), *_counts(bugs[of]), *_counts(since[of])) for name, of in parts.items()]
    columns = ["theme", "bugs", "flagged", "with a fair cause", "flagged since", "fair since"]
    kept = columns if _mended(file).exists() else columns[:4]
    return markdown(pd.DataFrame(rows, columns=columns)[kept])


def unnamed(file: Path) -> str:
    """Returns a row for each bug of a draw that is missed, then for each whose cause is not fair, then for each right
    entrant that is accused, with the reason in words."""
    table = _read(file)
    wrong = table["theme"] != "correct"
    missed, renamed = (wrong & (table["named"] == "no") & (table["flagged"] == flagged) for flagged in ("no", "yes"))
    accused = ~wrong & (table["flagged"] == "yes")
    rows = []
    for outcome, of in (("missed", missed), ("another name", renamed), ("accused", accused)):
        for id_, row in table[of].iterrows():
            said = (outcome, _said(row), row["worst"])
            rows.append((_link(str(id_), row), *said, _reason(file, str(id_))))
    return markdown(pd.DataFrame(rows, columns=["bug", "outcome", "verdict", "worst", "why"]))


def since(file: Path) -> str:
    """Returns a row for each entrant of a draw on which the mended verdict differs from the frozen verdict."""
    mended, before, after = _mended(file), _read(file), _since(file)
    rows = []
    for id_, row in after[(before[OUTCOME] != after[OUTCOME]).any(axis="columns")].iterrows():
        rows.append((_link(str(id_), row), _said(row), row["worst"], row["named"], _reason(mended, str(id_))))
    return markdown(pd.DataFrame(rows, columns=["bug", "verdict since", "worst", "fair", "how"]))


def bugs(file: Path) -> str:
    """Returns a row for each entrant of a draw: what happens, in which training, and what the verdicts say."""
    table = _read(file)
    mended = _since(file).loc[table.index]
    rows = []
    for (id_, row), (_, later) in zip(table.iterrows(), mended.iterrows(), strict=True):
        fair = "right" if row["theme"] == "correct" else "yes" if row["named"] == "yes" else f"no: {row['fair']}"
        changed = (row[OUTCOME] != later[OUTCOME]).any()
        said = f"{_said(later)} ({later['worst']})" if changed else ""
        training = f"{row['setting']}, {row['precision']}"
        rows.append((_link(str(id_), row), row["what"], training, _said(row), row["worst"], fair, said))
    columns = ["bug", "what happens", "training", "verdict", "worst", "fair", "since, if another"]
    return markdown(pd.DataFrame(rows, columns=columns)[columns if _mended(file).exists() else columns[:6]])


def _read(file: Path) -> pd.DataFrame:
    return pd.read_csv(file, dtype=str, keep_default_na=False).set_index("id")


def _mended(file: Path) -> Path:
    return file.with_stem(f"{file.stem}_mended")


def _since(file: Path) -> pd.DataFrame:
    """Returns the mended table of a draw, or the draw's own where the verdict was not mended since."""
    return _read(_mended(file) if _mended(file).exists() else file)


def _yes(table: pd.DataFrame, column: str) -> int:
    return int((table[column] == "yes").sum())


def _counts(bugs: pd.DataFrame) -> tuple[int, int]:
    return _yes(bugs, "flagged"), _yes(bugs, "named")


def _said(row: "pd.Series[str]") -> str:
    return f"differs: {row['cause']}" if row["flagged"] == "yes" else row["verdict"]


def _link(name: str, row: "pd.Series[str]") -> str:
    return f"[{name}]({row['link']})"


@cache
def _reasons(file: Path) -> "pd.Series[str]":
    return pd.read_csv(file, dtype=str).set_index(["table", "id"])["reason"]


def _reason(file: Path, bug: str) -> str:
    reasons = _reasons(file.with_name("reasons.csv"))
    if (file.stem, bug) not in reasons:
        raise ValueError(f"reasons.csv: {file.stem}, {bug}: expected a reason")
    return str(reasons[file.stem, bug])
