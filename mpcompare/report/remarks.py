"""The remarks on a comparison: lines beneath its table that say what the numbers cannot."""

from collections.abc import Mapping, Sequence

from mpcompare.race.turns import describe_timing
from mpcompare.report.clock import OTHERS, doubts, out_of_turn
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.runs import Run
from mpcompare.verdict.judge.word import Word

TOLERANCE = 0.05  # a measured peak further than this from the analytic model is named
FP32 = "fp32_precision "  # the flags of torch that say in which precision products of fp32 numbers are computed
# Variables of the environment that make the same program faster or slower. Others torch sets itself: KMP_INIT_AT_FORK.
_SPEED = (
    *("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "GOMP_", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_", "ONEDNN_"),
    *("DNNL_", "CUBLAS", "NVIDIA_TF32", "CUDA_LAUNCH_BLOCKING", "PYTORCH_"),
)


def because(comparison: Comparison) -> list[str]:
    """Returns a line for each verdict that has a reason."""
    judged = ((entry.label, entry.verdict) for entry in comparison.entries)
    return [f"{label} {verdict}: {verdict.because}" for label, verdict in judged if verdict and verdict.because]


def unchecked(comparison: Comparison) -> list[str]:
    """Returns what could not be checked of runs that are the same, or differ as declared: one line for all alike."""
    words = (Word.SAME, Word.NOT_SEEN, Word.WITHIN_NOISE, Word.DIFFERS_AS_DECLARED)
    judged = ((entry.label, entry.verdict) for entry in comparison.entries)
    return _alike({label: f"not checked: {', '.join(v.unchecked)}" for label, v in judged
                   if v and v.unchecked and v.word in words})  # fmt: skip


def resumed(comparison: Comparison) -> list[str]:
    """Returns the checkpoints from which runs continued, one line for all runs from one checkpoint, and the runs of a
    killed sweep with which others went on."""
    checkpoints = {e.label: resumed_from(e.run) for e in comparison.entries}
    lines = _alike({label: f"resumed from {checkpoint}" for label, checkpoint in checkpoints.items() if checkpoint})
    return lines + [f"{e.label}: {text}" for e in comparison.entries if (text := _went_on(e.run))]


def _went_on(run: Run) -> str:
    """Returns ``went on after step 10 of multirun/killed/0-amp-auto``; empty where it has not."""
    before = run.result.went_on
    if not before or run.result.resumed_from:
        return ""
    how = "taken as it is from" if before.step is None else f"went on after step {before.step} of"
    elsewhere = ", ".join(f"{key} {value}" for key, value in before.on.items() if value != run.recorded.get(key))
    return f"{how} {before.path}" + (f", which was on another machine ({elsewhere})" if elsewhere else "")


def resumed_from(run: Run) -> str:
    """Returns ``step 10 of amp bf16 (outputs/long)``; empty where training began at its beginning."""
    if not (checkpoint := run.result.resumed_from):
        return ""
    backend = " ".join(dict.fromkeys((str(checkpoint.backend), str(checkpoint.precision))))
    return f"step {checkpoint.step} of {backend} ({checkpoint.path})"


def timing(comparison: Comparison) -> list[str]:
    """Returns what makes the times doubtful, the worst first, then what the environment had set, and when timing
    stopped."""
    finished = comparison.finished
    lines = [line for entry in finished for line in doubts(entry, finished)]
    if not all(entry.side_by_side for entry in finished):
        lines.append("~ not timed in turns with its baseline: drift of the machine is in the ratio")
    busy = {entry.label: out_of_turn(entry) for entry in finished}
    active = "cores busy in the turns of others (OpenMP does with OMP_WAIT_POLICY=active)"
    others = disturbed(finished).items()
    lines += _alike({label: f"other programs kept {cores:.1f} cores busy meanwhile" for label, cores in others})
    lines += _alike({label: f"kept {cores:.2g} {active}" for label, cores in busy.items() if cores})
    stops = {entry.label: describe_timing(entry.run.finished.blocks.timing) for entry in finished}
    alone = list(stops.values())[:1] if len(set(stops.values())) == 1 else _alike(stops)
    return [*lines, *_products(finished), *_environment(comparison), *alone]


def disturbed(finished: Sequence[Entry]) -> dict[str, float]:
    """Returns the cores that other programs kept busy while an entrant was timed, by its label, where they are many."""
    busy, cores = {entry.label: out_of_turn(entry) for entry in finished}, {}
    for entry in finished:
        rivals = (rival for rival in finished if rival is not entry and rival.run.race == entry.run.race)
        cores[entry.label] = entry.run.blocks["other_cores"].median() - sum(busy[rival.label] for rival in rivals)
    return {label: others for label, others in cores.items() if others > OTHERS}


def _alike(said: Mapping[str, str]) -> list[str]:
    """Returns a line for each text, behind the labels of the runs of which it is said."""
    labels: dict[str, list[str]] = {}
    for label, text in said.items():
        labels.setdefault(text, []).append(label)
    return [f"{', '.join(alike)}: {text}" for text, alike in labels.items()]


def _products(entries: Sequence[Entry]) -> list[str]:
    """Returns a line for each run whose process computed fp32 products in another precision than was asked for."""
    lines = []
    for entry in entries:
        flags = entry.run.finished.machine.flags
        asked = {"none", "ieee", *(["tf32"] if entry.run.result.precision == "tf32" else [])}
        other = {name: value for name, value in flags.items() if name.startswith(FP32) and value not in asked}
        if flagged := ", ".join(f"{name.removeprefix(FP32)} in {value}" for name, value in other.items()):
            otherwise = "the backend lets torch compute products of fp32 numbers otherwise"
            lines.append(f"{entry.label}: {otherwise} ({flagged})")
    return lines


def environment(run: Run) -> str:
    """Returns the variables of ``_SPEED`` that were set for a run, as ``NAME=VALUE NAME=VALUE``."""
    variables = run.result.machine.environment if run.result.machine else {}
    return " ".join(f"{name}={value}" for name, value in variables.items() if name.startswith(_SPEED))


def _environment(comparison: Comparison) -> list[str]:
    """Returns what the environment had set: one line where that is the same for all runs."""
    known = {e.label: environment(e.run) for e in comparison.entries if e.run.result.machine}
    if len(set(known.values())) == 1:
        return [f"environment: {text}" for text in list(known.values())[:1] if text]
    return [f"{label}: environment: {text or 'nothing set'}" for label, text in known.items()]


def memory(entry: Entry) -> str:
    """Returns how far the measured peak is from the model, and whose operators' memory was live then; empty where
    that is within ``TOLERANCE``."""
    if not abs(entry.model_difference) > TOLERANCE:
        return ""
    used = entry.run.finished.memory
    difference = used.peak_memory_bytes - (used.peak_memory_bytes_analytic or 0)
    share = abs(100 * entry.model_difference)
    side = "above" if difference > 0 else "below"
    held = [f"{op} {size / 1e6:.1f} MB" for op, size in list(used.memory_by_op.items())[:3]]
    text = f"{entry.label}: measured {abs(difference) / 1e6:.1f} MB ({share:.1f} %) {side} the model"
    return f"{text}; most of the peak: {', '.join(held)}" if held else text
