"""The list of all outputs of a report."""

from collections.abc import Callable
from pathlib import Path

from mpcompare.report.contents import Report
from mpcompare.report.outputs import (
    console,
    digits_csv,
    dtypes_csv,
    figures,
    inference_csv,
    summary_csv,
    summary_md,
    summary_tex,
    verdict_json,
)
from mpcompare.report.outputs.page import output as page

Output = Callable[[Report, Path], None]  # given a report, and the folder for its files, which may be missing

# The console comes first: it shows the table before figures are drawn, and even where the folder cannot be written. The
# page comes last: it links to the other files.
OUTPUTS: tuple[Output, ...] = (
    console.write,
    summary_csv.write,
    summary_md.write,
    summary_tex.write,
    verdict_json.write,
    figures.write,
    dtypes_csv.write,
    digits_csv.write,
    inference_csv.write,
    page.write,
)
