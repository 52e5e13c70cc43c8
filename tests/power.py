"""The verdict's power: the checks that see each planted bug, and the correct runs that are accused.

    python tests/power.py planted --family all       tables of planted bugs by kinds of checks
    python tests/power.py correct --tasks 100        random tasks, seeds and precisions with scratch and fused
    python tests/power.py correct --family gpt       with the implementations of tests/support/correct.py
    python tests/power.py correct --family unstable  MLPs whose learning rate is too large
    python tests/power.py correct --family recipe    random optimizers, schedules, clips and accumulations
    python tests/power.py correct --family peers     tasks of all families with peers that are meant to be amp
    python tests/power.py correct --family dropout   networks with dropout, some of whose activations are computed again
    python tests/power.py correct --family groups    the same with parameter groups
    python tests/power.py correct --family branches  networks of which a batch uses one branch
    python tests/power.py correct --family masked    text of which labels are left out, in micro-batches
    python tests/power.py correct --family all       all of these
    python tests/power.py correct --family cnn --compiled  with amp_compile, one shape a family
    python tests/power.py networks --compiled        networks that others wrote, kept as docs/power/networks.csv
    python tests/power.py draw                       the draw of networks by the hashes of their names
    python tests/power.py forced                     40 networks under the forced replay, as docs/power/forced.csv
    python tests/power.py mutations --places 2       mutations in them, as docs/power/mutations.csv
    python tests/power.py real                       bugs of other libraries (docs/real_bugs.md)
    python tests/power.py real --table NAME          the same, kept as docs/real_bugs/NAME.csv, a new file
    python tests/power.py real --table second_draw   bugs of the second draw instead; so with all other draws

A draw is judged once. The name of a table that is taken after the verdict was mended ends in ``_mended``, as
``first_mended`` and ``second_draw_mended``; it takes the place of an older one, which is removed beforehand.

``planted --csv FOLDER`` also writes each table into FOLDER as planted_FAMILY.csv, with the cause that each bug was
planted for, and why a check cannot see it. ``correct --csv FOLDER`` writes a row for each backend and precision into
FOLDER as correct_FAMILY.csv. ``scripts/docs_numbers.py`` puts the tables on their pages. The exit code is 1 if a bug is
missed that should be seen, or if a correct run is accused; bugs of other libraries may be missed.
"""

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

sys.path.append(str(Path(__file__).parents[1] / "scripts"))  # where drawn_networks is

from planted.judged import judged
from planted.real import judged as real_judged
from planted.real import table as real_table
from planted.real.registry import CORRECT, LATER_DRAWS, THEMES, later_draw, real_bugs
from planted.registry import BF16, BOTH, FAMILIES, bugs_of
from support.backends import BACKENDS
from support.cases import CASES
from support.drawn import draw
from support.forced_tables import cases, forced_row, mutation_rows, put
from support.foreign import NETWORKS
from support.judged_networks import row_of, write
from support.judging import judged_case

from mpcompare.verdict.judge.kinds import KINDS
from mpcompare.verdict.judge.verdict import Verdict

TABLES = Path(__file__).parents[1] / "docs" / "power"
TABLE_OF_NETWORKS = TABLES / "networks.csv"


def planted(family: str, csv: Path | None = None) -> bool:
    """Prints a row a bug and precision: how many checks of each kind fail, and the verdict. Returns whether every
    visible bug is flagged."""
    print(f"| planted bug ({family}) | precision | {' | '.join(KINDS)} | verdict |")
    print(f"|{' --- |' * (len(KINDS) + 3)}")
    rows, table = [], []
    for bug in bugs_of(family):
        for precision in bug.precisions:
            verdict = judged(bug, precision)
            rows.append((bug, verdict))
            failed = Counter(check.kind for check in verdict.checks if not check.passed)
            counts = [str(failed[kind] or "") for kind in KINDS]
            print(f"| {bug.name} | {precision} | {' | '.join(counts)} | {verdict} |", flush=True)
            table.append((bug.name, precision, *counts, verdict, bug.cause, bug.invisible))
            if verdict.cause != bug.cause and not bug.invisible:
                print(f"not as planted ({bug.cause}): {verdict.because}", file=sys.stderr)
    if csv:
        columns = ["bug", "precision", *KINDS, "verdict", "cause", "invisible"]
        pd.DataFrame(table, columns=columns).to_csv(csv / f"planted_{family}.csv", index=False)
    visible = [(bug, verdict) for bug, verdict in rows if not bug.invisible]
    flagged = sum(verdict.word == "differs" for _, verdict in visible)
    named = sum(verdict.cause == bug.cause for bug, verdict in visible)
    bugs = len(bugs_of(family))
    print(f"{family}: {bugs} bugs, {len(rows)} rows: {flagged} flagged, {named} with their cause, ", end="")
    print(f"{len(visible) - flagged} missed, {len(rows) - len(visible)} invisible:")
    for bug, _ in rows:
        if bug.invisible:
            print(f"{bug.name}: {bug.invisible}")
    return flagged == len(visible)


class Tally:
    """Correct runs: how near the worst of them came to each limit, and how many were accused."""

    def __init__(self) -> None:
        self.worst: dict[str, tuple[float, str]] = defaultdict(lambda: (0.0, ""))  # share of the limit, check and run
        self.runs: Counter[str] = Counter()
        self.accused = self.parted = 0
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, precision: str, verdict: Verdict, where: str, task: str) -> None:
        """Counts a run, and prints it if it is accused."""
        if name != "amp":
            parted = any(part.startswith("training from") for part in verdict.unchecked)
            self.runs[name] += 1
            self.parted += parted
            self.rows.append({"backend": name, "precision": precision, "accused": verdict.word != "same"})
            self.rows[-1] |= {"parted": parted, **_shares(verdict)}
        if verdict.word not in ("same", "not seen", "reference"):
            self.accused += 1
            print(f"{where}{task}: {verdict}: {verdict.because}", flush=True)
        for check in verdict.checks:
            if check.limit and check.value / check.limit > self.worst[check.kind][0]:
                self.worst[check.kind] = check.value / check.limit, f"{check.name}; {where}"

    def show(self, family: str) -> None:
        for kind in KINDS:
            if kind in self.worst:
                share, where = self.worst[kind]
                print(f"{share:.3f} of the limit: {kind} ({where})")
        runs = ", ".join(f"{n} {name}" for name, n in self.runs.items())
        print(f"{family}: {self.runs.total()} correct runs ({runs}), ", end="")
        print(f"{self.accused} accused; {self.parted} parted from the reference's before their end")

    def write(self, file: Path) -> None:
        """Writes a row for each backend and precision: how many correct runs there were, how many of them were accused,
        and the worst share of the limits of each kind of checks."""
        runs = pd.DataFrame(self.rows)
        groups = runs.groupby(["backend", "precision"], sort=False)
        counts = groups[["accused", "parted"]].sum()
        table = pd.concat([groups.size().rename("correct runs"), counts["accused"]], axis=1)
        for kind in KINDS:
            if kind in runs and (runs[kind] > 0).any():
                table[kind] = groups[kind].max().map(lambda share: "" if pd.isna(share) else f"{share:.2f}")
        table["parted"] = counts["parted"]
        table.to_csv(file)

    def row(self) -> dict[str, Any]:
        """Returns all runs as a row of a table, with the worst share of the limits of each kind of checks."""
        runs = pd.DataFrame(self.rows)
        worst = {kind: f"{runs[kind].max():.2f}" for kind in KINDS if kind in runs and kind not in TIGHT}
        return {"correct runs": len(runs), "accused": self.accused, **worst, "parted": int(runs["parted"].sum())}


TIGHT = ("optimizer", "resume", "aged", "trained", "midway")  # right updates come to their bounds


def _shares(verdict: Verdict) -> dict[str, float]:
    """Returns, by kind, how near the worst check came to its limit."""
    shares: dict[str, float] = defaultdict(float)
    for check in verdict.checks:
        if check.limit:
            shares[check.kind] = max(shares[check.kind], check.value / check.limit)
    return shares


def correct(
    family: str, seeds: Iterable[int], precisions: Sequence[str], compiled: bool, csv: Path | None = None
) -> Tally:
    """Judges correct runs of every seed and precision."""
    tally, shapes = Tally(), {}
    for seed in seeds:
        for precision in precisions:
            case = CASES[family](seed, precision)
            if compiled:  # each shape takes half a minute to compile: one for all seeds
                shape = shapes.setdefault(precision, case)
                case = replace(shape, seed=seed, backends={"amp_compile": BACKENDS["amp_compile"]})
            for name, verdict in judged_case(case):
                task = f", {case.task}" if family in ("recipe", "groups", "branches", "masked") else ""
                tally.add(name, precision, verdict, f"seed {seed}, {precision}, {name}", task)
    tally.show(family)
    if csv:
        tally.write(csv / f"correct_{family}.csv")
    return tally


def real(table: str) -> bool:
    """Prints a row for each bug of another library, and keeps the rows as a table if it has a name. A table is of a
    later draw if its name begins with the draw's name. Returns whether no correct run is accused."""
    rows, at = [], real_table.commit()
    name = next((name for name in LATER_DRAWS if table.startswith(name)), "")
    for bug in later_draw(name) if name else real_bugs(*THEMES, CORRECT):
        rows.append(row := real_table.row_of(bug, real_judged.judged(bug), at))
        print(f"{row['theme']}, {row['id']}, {row['precision']}: {row['verdict']} {row['cause']} ", end="")
        print(f"({row['worst']} of its limit; fair: {row['fair'] or 'same'})", flush=True)
    print(real_table.counted(rows))
    if table:
        real_table.write(rows, table)
    return not any(row["theme"] == CORRECT and row["flagged"] == "yes" for row in rows)


def networks(only: str, compiled: bool) -> bool:
    """Prints a row for each network of others whose name holds ``only``, and puts them into the table. Returns whether
    no correct backend is accused."""
    rows = []
    for network in NETWORKS:
        if only in network.name:
            rows.append(row := row_of(network, compiled))
            print(" | ".join(row.values()), flush=True)
            write(rows, TABLE_OF_NETWORKS)
    return all(row["verdict"] == "same" for row in rows)


def drawn() -> bool:
    """Prints the draw of networks, name by name."""
    for line in draw():
        print(line, flush=True)
    return True


def forced(args: argparse.Namespace) -> bool:
    """Prints a row for each network under the forced replay, and puts it into the table. Returns whether no correct
    backend is accused."""
    good = True
    for network, precision in cases(args.only, args.precision or BOTH):
        row = forced_row(network, precision)
        print(" | ".join(row.values()), flush=True)
        put([row], TABLES / "forced.csv")
        good &= not row["accused"]
    return good


def mutations(args: argparse.Namespace) -> bool:
    """Prints a row for each kind of mutation of each network, and puts it into the table. Returns whether all are
    flagged."""
    good = True
    for network, precision in cases(args.only, args.precision or BOTH):
        rows = list(mutation_rows(network, precision, args.places))
        put(rows, TABLES / "mutations.csv")
        for row in rows:
            print(" | ".join(row.values()), flush=True)
            good &= not row["not flagged"]
    return good


def planted_families(args: argparse.Namespace) -> bool:
    good = True
    for family in FAMILIES if args.family == "all" else (args.family,):
        good &= planted(family, args.csv)
    return good


def correct_families(args: argparse.Namespace) -> bool:
    """Judges correct runs of one family, or of all but the peers', whose table is ``correct.csv``."""
    if args.family != "all":
        return not correct_family(args.family, args, args.csv).accused
    rows = []
    for family in CASES:
        if family != "peers":
            tasks = f"{args.tasks}, {' and '.join(precisions_of(family, args))}"
            rows.append({"family": family, "tasks and precisions": tasks, **correct_family(family, args, None).row()})
            if args.csv:
                pd.DataFrame(rows).to_csv(args.csv / "correct.csv", index=False)
    return not any(row["accused"] for row in rows)


def correct_family(family: str, args: argparse.Namespace, csv: Path | None) -> Tally:
    seeds = range(args.first, args.first + args.tasks)
    return correct(family, seeds, precisions_of(family, args), args.compiled, csv)


def precisions_of(family: str, args: argparse.Namespace) -> Sequence[str]:
    """Returns the precisions asked for; fp16 is left out where torch on a CPU does not have it, or is slow."""
    return args.precision or (BF16 if family in ("cnn", "lstm") else BOTH)


SUBJECTS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "planted": planted_families,
    "correct": correct_families,
    "networks": lambda args: networks(args.only, args.compiled),
    "draw": lambda _: drawn(),
    "forced": forced,
    "mutations": mutations,
    "real": lambda args: real(args.table),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=SUBJECTS)
    parser.add_argument("--family", choices=(*FAMILIES, "unstable", "peers", "all"), default="mlp")
    parser.add_argument("--tasks", type=int, default=25)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--precision", choices=BOTH, action="append")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="also write the tables there")
    parser.add_argument("--table", default="", help="the name of a new table of bugs of other libraries")
    parser.add_argument("--only", default="", metavar="NAME", help="the networks whose names hold this")
    parser.add_argument("--places", type=int, default=2, help="of each kind of mutation in each network")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as the tests do
    warnings.filterwarnings("ignore", "GradScaler|lr_scheduler|.*lr_scheduler.step")
    start = time.monotonic()
    good = SUBJECTS[args.what](args)
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
