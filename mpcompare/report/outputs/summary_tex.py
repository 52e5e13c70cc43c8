"""The file ``summary.tex``: the table as LaTeX, for ``\\input`` within a table of a paper."""

from collections.abc import Sequence
from pathlib import Path

from mpcompare.records import write_atomically
from mpcompare.report import summary
from mpcompare.report.columns import Column, one_line
from mpcompare.report.comparison import Row
from mpcompare.report.contents import Report
from mpcompare.report.formats import TEX

SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "`": r"\textasciigrave{}", '"': r"\textquotedbl{}", "-": "{-}",
    **{each: f"\\{each}" for each in "&%$#_{}"},
}  # fmt: skip


def write(report: Report, folder: Path) -> None:
    """Writes ``summary.tex`` into ``folder`` if the formats of the report hold it."""
    if TEX in report.formats:
        content = "\n".join(lines(report)) + "\n"
        write_atomically(folder / "summary.tex", lambda path: path.write_text(content, encoding="utf-8"))


def lines(report: Report) -> list[str]:
    """Returns one ``tabular`` with the rows of all comparisons, each below its title where there are several."""
    columns = summary.brief(report.rows)
    body = [_row([column.heading for column in columns])]
    for comparison in report.comparisons:
        body.append(r"\midrule")
        if len(report.comparisons) > 1:
            title = escape(one_line(comparison.title))
            body.append(rf"\multicolumn{{{len(columns)}}}{{l}}{{{title}}} \\")
        body += [_row(_cells(columns, row)) for row in comparison.rows]
    sides = "".join(column.justify[0] for column in columns)
    titles = [f"% {one_line(comparison.title)}" for comparison in report.comparisons]
    return [
        "% Written by mpcompare. Needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}.",
        *titles,
        rf"\begin{{tabular}}{{{sides}}}",
        r"\toprule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _cells(columns: Sequence[Column[Row]], row: Row) -> list[str]:
    """Returns the cells of a run, without the sign of its verdict, which LaTeX's fonts may lack."""
    before = f"{row.entry.verdict.said.sign} " if row.entry.verdict else ""
    named = zip(columns, summary.brief_cells(columns, row), strict=True)
    return [cell.removeprefix(before) if column.name == "verdict" else cell for column, cell in named]


def escape(text: str) -> str:
    """Returns a text as LaTeX that prints it as it is."""
    return "".join(SPECIAL.get(each, each) for each in text)


def _row(cells: list[str]) -> str:
    return " & ".join(map(escape, cells)) + r" \\"
