"""``python -m mpcompare.report FOLDER...``: draws the comparison of finished runs again."""

import argparse
from pathlib import Path

from mpcompare.__main__ import fail
from mpcompare.errors import InputError


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mpcompare.report",
        description="Draw the comparison of finished runs: a table, summary.csv, loss.png, step_time.png, memory.png.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a sweep, a run, or a folder of them")
    parser.add_argument("--out", type=Path, help="where the report goes (default: FOLDER/report, of the first FOLDER)")
    parser.add_argument("--baseline", default="amp", help="backend to compare with (default: amp)")
    args = parser.parse_args()

    from mpcompare.report import report

    try:
        report(args.folders, args.out or args.folders[0] / "report", args.baseline)
    except InputError as error:
        fail(str(error))
    except OSError as error:
        fail(f"--out={args.out}: cannot write there ({error.strerror})")


if __name__ == "__main__":
    main()
