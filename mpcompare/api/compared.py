"""The result of a comparison: the report on its folder, as objects."""

import webbrowser
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from mpcompare.errors import InputError
from mpcompare.report import summary
from mpcompare.report.comparison import Entry, Row
from mpcompare.report.contents import Report
from mpcompare.report.figures.registry import FIGURES
from mpcompare.report.outputs import data, summary_md
from mpcompare.report.report import contents_of
from mpcompare.verdict.judge.verdict import Verdict
from mpcompare.verdict.judge.word import Word


class Compared:
    """The runs of a sweep, compared and judged. A notebook shows the table and the verdicts.

    Attributes:
        folder: the records of the runs; the files of the report are in ``report`` below it.
        report: the comparisons that everything here is read from.
    """

    def __init__(self, folder: Path, report: Report) -> None:
        self.folder, self.report = folder, report

    @cached_property
    def table(self) -> pd.DataFrame:
        """The table of ``summary.csv``, a row a run, with the labels of the runs as its index."""
        labels = pd.Index(list(self._entries), name="label")
        return pd.DataFrame(data.summary_rows(self.report), index=labels)

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The verdict on each run that finished, by its label, such as ``amp bf16``."""
        return {label: entry.verdict for label, entry in self._entries.items() if entry.verdict}

    @property
    def errors(self) -> Mapping[str, str]:
        """For each run that did not finish the reason in one line, by its label."""
        return {label: entry.error for label, entry in self._entries.items() if entry.error}

    @cached_property
    def figures(self) -> Mapping[str, Figure]:
        """The figures of the report that have something to show, by name."""
        drawn = {name: draw(self.report) for name, draw in FIGURES.items()}
        return {name: figure for name, figure in drawn.items() if figure}

    def open(self) -> None:
        """Shows the page of the report, with all figures, in a browser."""
        webbrowser.open((self.folder / "report" / "index.html").absolute().as_uri())

    def __repr__(self) -> str:
        return "\n".join(summary_md.lines(self.report))

    def _repr_html_(self) -> str:
        return Markup("").join(self._html())

    def _html(self) -> Iterator[Markup]:
        for comparison in self.report.comparisons:
            columns = summary.brief(comparison.rows)
            yield Markup("<p><b>{}</b></p><table><tr>").format(comparison.title)
            yield from (Markup("<th>{}</th>").format(column.heading) for column in columns)
            for row in comparison.rows:
                yield Markup("</tr><tr>")
                yield from (Markup("<td>{}</td>").format(cell) for cell in summary.brief_cells(columns, row))
            yield Markup("</tr></table><ul>")
            yield from map(_sentence, comparison.rows)
            yield Markup("</ul>")
        yield Markup("<p>Records, figures and the page: {}</p>").format(self.folder)

    @property
    def _entries(self) -> dict[str, Entry]:
        """The runs by their labels, to which the folder is added where two runs share one."""
        entries: dict[str, Entry] = {}
        for entry in self.report.entries:
            entries[entry.label if entry.label not in entries else f"{entry.label} ({entry.run.name})"] = entry
        return entries


def read(folder: Path) -> Compared:
    """Returns the comparison of the runs in a folder. Raises InputError where there is none, or none finished."""
    compared = Compared(folder, contents_of([folder]))
    if not compared.verdicts:
        raise InputError.of(f"no run finished: {'; '.join(dict.fromkeys(compared.errors.values()))}")
    return compared


def _sentence(row: Row) -> Markup:
    """Returns what is said of a run: the verdict and its cause, or the reason why it did not finish."""
    if not row.entry.ok:
        said = f"{row.entry.run.result.status}: {row.entry.error}"
    elif (verdict := row.entry.verdict) is None:
        said = str(Word.NOT_EXAMINED)
    else:
        said = ": ".join(filter(None, [str(verdict), verdict.because]))
    return Markup("<li><b>{}</b> {}</li>").format(row.entry.label, said)
