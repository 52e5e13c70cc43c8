"""The file ``summary.md``: the answer in words, a table, and how it was measured, to be pasted into a pull request."""

import re
from collections.abc import Sequence
from pathlib import Path

from mpcompare.foreign import without_folders
from mpcompare.records import write_atomically
from mpcompare.report import digits, remarks, summary
from mpcompare.report.answers import answers
from mpcompare.report.columns import LONGEST, one_line
from mpcompare.report.comparison import Comparison, Row
from mpcompare.report.contents import Report
from mpcompare.verdict.judge.word import Word

LINES = 40  # lines of the file at most
ANSWERS, VERDICTS, MEASURED = 6, 12, 8  # lines at most; the table takes the others
FIXED = 7  # the heading, the head of the table and its rule, and four blank lines
REASON = 4000  # characters of a reason, which is kept whole
# Backslashes keep these characters from being markup. An underscore within a word is no markup.
MARKUP = re.compile(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])")


def write(report: Report, folder: Path) -> None:
    """Writes ``summary.md`` into ``folder``."""
    content = "\n".join(lines(report)) + "\n"
    write_atomically(folder / "summary.md", lambda path: path.write_text(content, encoding="utf-8"))


def lines(report: Report) -> list[str]:
    """Returns the lines of the file, at most :data:`LINES`. What finds no room is counted in a line of its own."""
    several = len(report.comparisons) > 1
    title = f"{len(report.comparisons)} comparisons" if several else escape(report.comparisons[0].title)
    answered = _cut(_answers(report), ANSWERS, "- and {} more comparisons: index.html")
    verdicts = _cut(_verdicts(report), VERDICTS, "- and {} more: verdict.json")
    measured = _cut(_measured(report), MEASURED, "- and {} more remarks")
    head, *rows = _table(report)
    room = LINES - FIXED - len(answered) - len(verdicts) - len(measured)
    rows = _cut(rows, room, "| and {} more: summary.csv " + "| " * head.count(" | ") + "|")
    rule = "|" + "|".join(["---"] * (head.count(" | ") + 1)) + "|"
    return [f"### mpcompare: {title}", "", *answered, "", head, rule, *rows, "", *verdicts, "", *measured]


def escape(text: str, longest: int = LONGEST) -> str:
    """Returns a text as one line of Markdown that shows the text as it is, without the folders before the name of a
    file: no markup, no HTML, no mention of anybody."""
    line = without_folders(one_line(text, longest)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = MARKUP.sub(lambda match: f"\\{match.group()}", line)
    return re.sub(r"@(?=\w)", "@\u200b", line)  # a space of no width: a name behind @ would be sent a message


def _answers(report: Report) -> list[str]:
    """A line for each answer; where there are several comparisons, a line for each of them."""
    each = []
    for comparison in report.comparisons:
        said = [
            f"**{answer.question}** {' '.join(answer.lines(lambda name: f'`{_code(name)}`', _spaced))}"
            for answer in answers(comparison)
        ]
        number = _number(report, comparison)
        each += [f"- {number}{' '.join(said)}"] if number else [f"- {line}" for line in said]
    return each


def _spaced(text: str) -> str:
    """Returns a piece of a sentence as Markdown, with the spaces at its ends."""
    before, after = (" " * text[:1].isspace(), " " * text[-1:].isspace())
    return f"{before}{escape(text)}{after}" if text.strip() else text


def _cut(listed: Sequence[str], most: int, more: str) -> list[str]:
    if len(listed) <= most:
        return list(listed)
    return [*listed[: most - 1], more.format(len(listed) - most + 1)]


def _number(report: Report, comparison: Comparison) -> str:
    """The number of a comparison, by which verdicts and remarks name it where there are several; else empty."""
    place = next(n for n, each in enumerate(report.comparisons, start=1) if each is comparison)
    return f"({place}) " if len(report.comparisons) > 1 else ""


def _verdicts(report: Report) -> list[str]:
    """A line for each verdict, the most important first. Runs of which the same is said share a line."""
    alike: dict[tuple[int, str, str, str], list[str]] = {}
    for row in report.rows:
        said, rest = _said(row)
        key = (row.entry.word.place, _number(report, row.comparison), said, rest)
        alike.setdefault(key, []).append(f"`{_code(row.entry.label)}`")
    different = [
        f"- {_number(report, comparison)}**{escape(comparison.not_the_same)}**"
        for comparison in report.comparisons
        if comparison.not_the_same
    ]
    return different + [
        f"- {number}**{said}**: {', '.join(labels)}{rest}"
        for (_, number, said, rest), labels in sorted(alike.items(), key=lambda item: item[0][0])
    ]


def _said(row: Row) -> tuple[str, str]:
    """Returns the verdict in words, and what follows the label of the run."""
    verdict = row.entry.verdict
    if not row.entry.ok:
        return escape(row.entry.run.result.status), f": {escape(row.entry.error)}"
    because = f": {escape(verdict.because, REASON)}" if verdict and verdict.because else ""
    if verdict is None or verdict.word is Word.NOT_EXAMINED:
        return "Not examined", because
    if verdict.word is Word.REFERENCE:
        return "Reference", f"; {row.comparison.of_reference(row.entry)}{because}"
    reference = row.comparison.reference(row.entry)
    compared = f", compared with `{_code(reference.label)}`" if reference and reference is not row.entry else ""
    unchecked = f"; not checked: {escape(', '.join(verdict.unchecked))}" if verdict.unchecked else ""
    if verdict.word is Word.SAME:
        sees = f"; {verdict.sees}" if verdict.sees else ""
        return "Same", compared + sees + unchecked
    if verdict.word is Word.WITHIN_NOISE:
        return "Within noise", f"{compared}, but its gradients cannot be seen{unchecked}"
    said = escape(str(verdict)[:1].upper() + str(verdict)[1:])
    if verdict.word is Word.DIFFERS_AS_DECLARED:
        return said, compared + unchecked
    return said, compared + because


def _table(report: Report) -> list[str]:
    """The head of the table and its rows, without the rule between them."""
    columns = summary.brief(report.rows)
    several = len(report.comparisons) > 1
    table = [[*(["comparison"] if several else []), *(column.heading for column in columns)]]
    for comparison in report.comparisons:
        for place, row in enumerate(comparison.rows):
            title = "" if place else f"{_number(report, comparison)}{comparison.title}"
            table.append([*([title] if several else []), *summary.brief_cells(columns, row)])
    return [f"| {' | '.join(map(escape, cells))} |" for cells in table]


def _measured(report: Report) -> list[str]:
    """A line for each comparison on its machine and data, and one for each remark on its timing."""
    machines, timing = [], []
    for comparison in report.comparisons:
        number, entries = _number(report, comparison), comparison.finished or comparison.entries
        recorded = entries[0].run.recorded
        known = {
            "device": recorded.get("device_name"),
            "threads": recorded.get("threads"),
            "torch": recorded.get("versions", {}).get("torch"),
            "mpcompare": recorded.get("commit"),
        }
        machine = ", ".join(f"{key} {value}" for key, value in known.items() if value)
        machines.append(f"- {number}Measured on {escape(machine or 'no device')}; {escape(comparison.dataset)}")
        if comparison.finished:
            timing += [f"- {number}{escape(line)}" for line in digits.lines(comparison)]
            timing += [f"- {number}{escape(line)}" for line in remarks.timing(comparison)]
    return machines + timing


def _code(text: str) -> str:
    """Returns a text for a code span, in which nothing is markup but its own end."""
    return one_line(text).replace("`", "'")
