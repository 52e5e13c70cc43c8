"""The watch's word on the loops of others, on bugs in them, and on random loops.

    python tests/watch/judge.py loops                  each loop that is right, and its defects
    python tests/watch/judge.py bits                   whether they train to the same bits under the watch
    python tests/watch/judge.py bugs                   the drawn bugs
    python tests/watch/judge.py second                 the second draw of bugs, each with its right twin
    python tests/watch/judge.py third                  the third draw, likewise
    python tests/watch/judge.py fourth                 the fourth draw, likewise
    python tests/watch/judge.py careful                right loops that stand for the defects of the fourth draw
    python tests/watch/judge.py controls               loops in the form of bugs, but without bugs
    python tests/watch/judge.py random --number 300    random loops that are right
    python tests/watch/judge.py bugs --csv FILE        also writes the table into FILE, which must not be there yet
    python tests/watch/judge.py bugs --only vsepp#4    one bug, with all that the watch says

A bug is flagged if the watch has a defect. It has a fair name if the first defect's cause is one of the names that were
written down before. ``expected`` says whether the loop is refused with what its user meant: its precision and the norm
of clipping. In the draws with twins ``refused`` holds only the facts that are not what the user meant. A loop that is
right must have no defect, and it must have the same state, bit for bit, after 20 watched and after 20 unwatched
updates. The exit code is 1 if a right loop is accused or changed, and 0 whatever happens to bugs.
"""

# ruff: noqa: E402 (a script in a folder of tests finds its imports by the path that it sets first)

import argparse
import csv
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

import torch
from torch import Tensor
from watch.bugs.controls import CONTROLS
from watch.bugs.every import BUGS
from watch.bugs.registry import Bug
from watch.draws import DRAWS
from watch.fourth_draw.every import CAREFUL
from watch.judging import SLACK, Judged, judged, one_line
from watch.loops.base import Loop
from watch.loops.every import LOOPS
from watch.random_loops import RandomLoop
from watch.second_draw.registry import Bug as TwinnedBug

import mpcompare

BITS_AFTER = 20  # updates
Row = dict[str, Any]


def state_of(loop: Loop) -> list[Tensor]:
    """Returns the parameters and buffers of a loop's network, and the state of its optimizer."""
    optimizer = loop.optimizer
    while hasattr(optimizer, "optimizer"):  # the wrappers of Accelerate and Fabric
        optimizer = optimizer.optimizer
    moments = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return [*loop.trained.state_dict().values(), *moments]


def changed_bits(make: Callable[[], Loop], updates: int = BITS_AFTER) -> int:
    """Returns how many tensors of a loop's state differ between watched and unwatched updates."""
    plain = make()
    plain.train(updates)
    watched = make()
    with mpcompare.watch(watched.model, watched.optimizer, steps=updates):
        watched.train(updates)
    left, right = state_of(plain), state_of(watched)
    return sum(not equal(a, b) for a, b in zip(left, right, strict=True))


def equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are equal; NaN equals NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all()) if a.shape == b.shape else False


def row_of_loop(name: str, precision: str, computes: str | None, result: Judged) -> Row:
    return {
        "loop": name,
        "precision": precision,
        "computes in": computes or precision,
        "verdict": result.verdict,
        "causes": ", ".join(result.causes),
        "because": result.sentences[0] if result.sentences else "",
        "expected": "refused" if result.expected else "kept",
        "seconds": f"{result.seconds:.1f}",
        "commit": commit(),
    }


def loops(only: str) -> Iterator[tuple[Row, bool, str]]:
    """Yields a row for each right loop and precision, whether the row is right, and what the watch printed."""
    for loop, precision in cases(only):
        result = judged(loop(precision), loop.meant(precision))
        row = row_of_loop(loop.name, precision, loop.computes, result)
        yield row, not result.flagged and result.verdict != "error", result.text


def bits(only: str) -> Iterator[tuple[Row, bool, str]]:
    """Yields how many tensors of each right loop's state the watch changes. There is nothing to print."""
    for loop, precision in cases(only):
        try:
            changed: Any = changed_bits(lambda loop=loop, precision=precision: loop(precision))  # type: ignore[misc]
        except Exception as error:
            changed = one_line(f"{type(error).__name__}: {error}")
        row = {"loop": loop.name, "precision": precision, "updates": BITS_AFTER, "tensors changed": changed}
        yield row | {"commit": commit()}, changed == 0, ""


def cases(only: str) -> Iterator[tuple[type[Loop], str]]:
    """Yields the right loops with their precisions."""
    for loop in LOOPS:
        if not only or only == loop.name:
            yield from ((loop, precision) for precision in loop.precisions)


def controls(only: str) -> Iterator[tuple[Row, bool, str]]:
    """Yields the rows of ``loops`` for the loops in the form of bugs, whose bits are not compared."""
    for loop, precision, after in CONTROLS:
        if not only or only == loop.__name__:
            result = judged(loop(precision), loop.meant(precision), after)
            row = row_of_loop(loop.__name__, precision, loop.computes, result)
            yield row, not result.flagged and result.verdict != "error", result.text


def careful(only: str) -> Iterator[tuple[Row, bool, str]]:
    """Yields a row for each careful loop of the fourth draw, whether it has no defect, and what the watch printed."""
    for loop in CAREFUL:
        if not only or only in (loop.thread, loop.thread.rpartition("/")[2]):
            result = judged(loop.seeded(), loop.meant)
            row = {
                "thread": loop.thread,
                "loop": loop.make.__name__,
                "what": loop.what,
                "verdict": result.verdict,
                "says": "; ".join(result.sentences),
                "refused": "; ".join(result.differing),
                "seconds": f"{result.seconds:.1f}",
                "commit": commit(),
            }
            yield row, not result.flagged and result.verdict != "error", result.text


def random_loops(number: int, only: str) -> Iterator[tuple[Row, bool, str]]:
    """Yields the rows of ``loops`` for random loops, and how many tensors of each loop's state the watch changes. A
    network that is in 16 bits as a whole may have the defect that its weights hardly train, and no other."""
    for place in range(number):
        if only and only != str(place):
            continue
        loop = RandomLoop(place)
        result = judged(loop, {}, slack=1)
        row = row_of_loop(loop.name, loop.precision, None, result)
        row["drawn"] = ", ".join(f"{key} {value}" for key, value in loop.drawn.items())
        row["not examined"] = "; ".join(result.not_examined)
        changed = 0
        if result.verdict != "error":
            changed = changed_bits(lambda place=place: RandomLoop(place), 6)  # type: ignore[misc]
        row["tensors changed"] = changed
        known = {"no master weights"} if loop.is_short else set()
        yield row, known.issuperset(result.causes) and result.verdict != "error" and not changed, result.text


def bugs(only: str) -> Iterator[tuple[Row, bool, str]]:
    """Yields a row for each drawn bug, True, and what the watch printed."""
    for bug in BUGS:
        if not only or only == bug.id:
            result = judged(bug.loop(bug.precision), bug.loop.meant(bug.precision), bug.after, bug.steps)
            yield row_of_bug(bug, result), True, result.text


def row_of_bug(bug: Bug, result: Judged) -> Row:
    first = result.causes[0] if result.causes else ""
    return {
        "id": bug.id,
        "link": bug.link,
        "loop": bug.loop.name,
        "precision": bug.precision,
        "what": bug.what,
        "fair": ", ".join(bug.fair),
        "verdict": result.verdict,
        "cause": first,
        "place": result.places[0] if result.places else "",
        "because": result.sentences[0] if result.sentences else "",
        "all causes": ", ".join(dict.fromkeys(result.causes)),
        "flagged": yes(result.flagged),
        "named": yes(first in bug.fair),
        "named anywhere": yes(any(cause in bug.fair for cause in result.causes)),
        "expected": "refused" if result.expected else "kept",
        "commit": commit(),
    }


def draw(bugs: list[TwinnedBug], only: str) -> Iterator[tuple[Row, bool, str]]:
    """Yields a row for each bug of a draw, whether its twin has no defect, and what the watch printed."""
    for bug in bugs:
        if not only or only in (bug.id, bug.thread):
            slack = bug.steps + SLACK  # some of these loops train whole epochs
            result, twin = (judged(bug.seeded(wrong), bug.meant, 0, bug.steps, slack) for wrong in (True, False))
            right = not twin.flagged and twin.verdict != "error"
            yield row_of_draw(bug, result, twin), right, f"{result.text}\n--- its right twin\n{twin.text}"


def row_of_draw(bug: TwinnedBug, result: Judged, twin: Judged) -> Row:
    first = result.causes[0] if result.causes else ""
    return {
        "thread": bug.thread,
        "loop": bug.make.__name__,
        "what": bug.what,
        "kind": bug.kind,
        "precision": bug.precision,
        "fair": ", ".join(bug.fair),
        "verdict": result.verdict,
        "flagged": yes(result.flagged),
        "cause": first,
        "all causes": ", ".join(dict.fromkeys(result.causes)),
        "fair name": yes(first in bug.fair),
        "refused": "; ".join(result.differing),
        "twin": "; ".join(twin.sentences) or twin.verdict,
        "twin refused": "; ".join(twin.differing),
        "seconds": f"{result.seconds + twin.seconds:.1f}",
        "commit": commit(),
    }


def yes(value: bool) -> str:
    return "yes" if value else "no"


def commit() -> str:
    """Returns the commit that is checked out."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def shown(rows: Iterable[tuple[Row, bool, str]], whole: bool, file: Path | None) -> tuple[list[Row], int]:
    """Prints each row as it comes, and writes it into the file. Returns all rows, and how many are not as they should
    be."""
    kept, wrong = [], 0
    for row, right, text in rows:
        told = [f"{key}: {value}" for key, value in row.items() if key not in ("link", "what", "commit", "drawn")]
        print(f"{'' if right else 'WRONG '}{'; '.join(told)}", flush=True)
        if whole:
            print(text, flush=True)
        if file:
            write(row, file)
        kept.append(row)
        wrong += not right
    return kept, wrong


def write(row: Row, file: Path) -> None:
    """Adds a row to the table of a file, which is made where it is missing."""
    begins = not file.exists()
    file.parent.mkdir(exist_ok=True)
    with file.open("a", newline="") as opened:
        writer = csv.DictWriter(opened, list(row), lineterminator="\n")
        if begins:
            writer.writeheader()
        writer.writerow(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loops", "bits", "bugs", *DRAWS, "careful", "controls", "random"))
    parser.add_argument("--number", type=int, default=300, help="of random loops")
    parser.add_argument("--only", default="", help="the name of a loop, the id of a bug, the number of a random loop")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    if options.csv and options.csv.exists():
        parser.error(f"--csv: {options.csv} is there already")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.what == "bugs":
        rows, wrong = shown(bugs(options.only), bool(options.only), options.csv)
        counts = {name: sum(row[name] == "yes" for row in rows) for name in ("flagged", "named", "named anywhere")}
        refused = sum(row["expected"] == "refused" for row in rows)
        print(f"{len(rows)} bugs: {counts}, refused with what was meant: {refused}")
    elif options.what in DRAWS:
        rows, wrong = shown(draw(DRAWS[options.what], options.only), bool(options.only), options.csv)
        counts = {name: sum(row[name] == "yes" for row in rows) for name in ("flagged", "fair name")}
        refused = sum(bool(row["refused"]) for row in rows)
        print(f"{len(rows)} bugs: {counts}, refused with what was meant: {refused}, right twins accused: {wrong}")
    else:
        whole = bool(options.only)
        made: Iterator[tuple[Row, bool, str]]
        if options.what == "random":
            made = random_loops(options.number, options.only)
        else:
            made = {"loops": loops, "bits": bits, "careful": careful, "controls": controls}[options.what](options.only)
        rows, wrong = shown(made, whole, options.csv)
        print(f"{len(rows)} right loops: {wrong} accused, changed or broken")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
