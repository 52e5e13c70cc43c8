"""``python -m mpcompare.report FOLDER...``: draws the comparison of finished runs again."""

import argparse
import sys
from pathlib import Path

from mpcompare.errors import InputError, fail
from mpcompare.interrupt import ends_when_interrupted
from mpcompare.report.formats import FORMATS
from mpcompare.report.report import report
from mpcompare.streams import lasting


@lasting()
@ends_when_interrupted()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mpcompare.report",
        usage="%(prog)s FOLDER... [--out OUT] [--baseline BASELINE] [--allow [FIELD ...]] [--strict] "
        "[--formats [FORMAT ...]]",
        description="Draw the comparison of finished runs: a table, summary.csv, the figures. "
        "Several folders are merged: of one task, from any number of machines. "
        "Exit code 1 where a run did not finish (or differs, with --strict), 2 where the runs are not comparable.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a sweep, a run, or a folder of them")
    parser.add_argument("--out", type=Path, help="where the report goes (default: FOLDER/report, of the first FOLDER)")
    parser.add_argument("--baseline", help="backend to compare with (default: as the first run was configured)")
    parser.add_argument(
        "--allow",
        nargs="*",
        metavar="FIELD",
        help="fields in which runs of one comparison may differ all the same: task.optimizer.lr and the like, "
        "task.model for all in it, train.steps, seed, dataset_fingerprint, initial_weights "
        "(default: as for --baseline)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        default=None,
        help="exit code 1 where a run's verdict is that it differs from its reference (default: as for --baseline)",
    )
    parser.add_argument(
        "--formats",
        nargs="*",
        metavar="FORMAT",
        help=f"formats of the figures, of {', '.join(FORMATS)}; tex is the table as LaTeX (default: as for --baseline)",
    )
    args = parser.parse_args()
    out = args.out or args.folders[0] / "report"
    try:
        good = report(args.folders, out, args.baseline, args.allow, args.strict, args.formats)
    except InputError as error:
        fail(str(error))
    except OSError as error:
        fail(f"--out={out}: cannot write there ({error.strerror})")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
