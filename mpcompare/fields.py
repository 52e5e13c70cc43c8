"""``result.json`` as a tree of dataclasses: entrants write its parts, and a report reads all of it (report/runs.py).

The file is flat: it holds the fields of all parts on one level. Backends of strangers answer some of the fields, and
records come from anywhere. A report is drawn from many records, and one wrong value must cost no other run.
"""

from dataclasses import dataclass
from typing import Any, TypedDict, get_type_hints

from mpcompare.phases import Phase
from mpcompare.typed import check_type


class TrainFields(TypedDict):
    """A part of the section ``train`` of a configuration."""

    steps: int
    warmup_steps: int


class AskedReport(TypedDict, total=False):
    """The section ``report`` of a configuration."""

    baseline: Any
    strict: bool
    allow: list[str]
    formats: list[str]


class ConfigAtLeast(TypedDict):
    task: dict[str, Any]


class Config(ConfigAtLeast, total=False):
    """A configuration, as far as a report depends on it."""

    train: TrainFields
    report: AskedReport
    backend: dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """The end of timing."""

    rounds: int  # the number of rounds
    stopped: str  # ``rel_ci`` (every interval is narrow enough) or ``budget`` (time ran out)
    half_width: float  # relative, of the widest interval of a ratio; with one entrant, of its step time
    seconds: float  # duration of timing
    race: str | None  # a name shared by all entrants that took turns to the end; None for one alone
    compared: int  # the round whose block is compared with the examined backend's, drawn for each entrant


LOSS = "(loss)"  # the row of all that lies between the network's output and its gradient


class LayerFields(TypedDict):
    """The dtypes of a layer."""

    kind: str
    master: str
    weight: str
    input: str
    computes: str
    output: str
    gradient: str
    backward: str


@dataclass(frozen=True)
class WayFields:
    """The numbers of one way of inference, or the reason why there are none."""

    test_loss: float | None = None
    test_accuracy: float | None = None
    latency_ms: float | None = None
    latency_ms_p20: float | None = None
    latency_ms_p80: float | None = None
    samples_per_s: float | None = None
    peak_memory_bytes: int | None = None
    weight_bytes: int | None = None
    unavailable: str | None = None


@dataclass(frozen=True)
class InferenceFields:
    """The ways of inference by their names."""

    batch_size: int
    ways: dict[str, WayFields]


@dataclass(frozen=True)
class Distance:
    """The distance between two ends of one block, of tensors of one kind together."""

    difference: float  # between the tensors that the timed backend and the trained backend left
    moved: float  # between the trained backend's tensors at the start and at the end of the block
    norm: float  # the norm of the tensors that the trained backend left


@dataclass(frozen=True)
class ResumeFields:
    """The checkpoint at which training began."""

    path: str
    step: int
    backend: str | None  # None: the checkpoint does not say it
    precision: str | None
    weights: str  # a hash of the weights


@dataclass(frozen=True)
class WentOn:
    """The run of a sweep that was killed, with which a run goes on."""

    path: str
    step: int | None  # the step after which it goes on; None where all of the run is taken
    on: dict[str, Any]  # the machine of the killed run, as far as it is known


@dataclass(frozen=True)
class SetUpRecord:
    """The part on what is made once."""

    precision: str  # resolved
    engine: str  # the answer of a new backend to what computes its products
    loss_scale: str  # the name of its kind
    construct_s: float  # seconds in which the first backend was made, with all that is built or compiled for it
    dataset: str
    dataset_reason: str  # the reason why the data set was taken
    dataset_fingerprint: str  # a hash of all its samples
    initial_weights: str  # a hash of the initial weights
    not_finite: str  # the place of numbers, in the data or the first loss, on which fp32 cannot train; or empty


@dataclass(frozen=True)
class ProvenanceRecord:
    """The part on the machine and its state, as far as a result may depend on them."""

    device: str  # cpu or cuda
    device_name: str
    host: str | None  # a hash of the machine's name
    threads: int | None  # the number of threads that torch uses
    cpu_count: int | None
    platform: str | None
    python: str | None
    versions: dict[str, str | None]  # the versions of packages; None where a package is not installed
    cuda: str | None  # None on a CPU, as the driver
    driver: str | None
    flags: dict[str, bool | str | None]  # the flags of torch's matrix products
    environment: dict[str, str]  # variables that change speed without being seen in the configuration
    commit: str | None  # the project's commit, with -dirty where files differ from it; None where it is not known


@dataclass(frozen=True)
class TrainingRecord:
    """The part on training."""

    first_step_ms: float
    skipped_steps: int  # the number of steps that updated nothing
    final_loss: float  # the loss of the last step
    final_loss_scale: float  # the scale after the last step
    engine: str  # the trained backend's answer to what computes its products
    dtypes: dict[str, str]  # observed in the last step
    rss_before_bytes: int | None  # the resident set before training; None where it is not known
    peak_rss_bytes: int | None  # the largest resident set during training
    test_loss: float | None  # the loss on the held-out samples
    test_accuracy: float | None


@dataclass(frozen=True)
class ExaminedRecord:
    """The part of a run that was examined."""

    examine_s: float  # the seconds that the examination took
    examine_foretold_bytes: int | None  # the memory that it was foretold to take; None where that is not known
    examine_peak_bytes: int | None  # the most memory that it took; None where that is not known
    examine_refused: str  # a line that says why it did not begin: there is too little memory; empty where it began
    examine_stopped: str  # the error that stopped all of it, so that nothing was found; empty where none did


@dataclass(frozen=True)
class BlocksRecord:
    """The part on timed blocks."""

    step_ms_p20: float  # milliseconds a step, quantiles of the blocks
    step_ms_p50: float
    step_ms_p80: float
    samples_per_s: float  # by the median step
    flops_per_step: int | None  # operations of the products; None where they are not known
    tflops: float | None  # 1e12 operations a second
    timing: Timing
    timed_unfinished: int  # blocks whose weights went on changing after the clock had stopped


@dataclass(frozen=True)
class ComparedRecord(BlocksRecord):
    """The part of a run that was examined: a timed block, the one that the race drew, and the trained backend's."""

    timed_loss: float  # the trained backend's loss in the last step
    timed_loss_difference: float  # the larger of the differences in the first step and in the last
    timed_state: dict[str, Distance]  # the distance of the two states, by kind of tensor
    timed_steps: int  # the number of the block's steps, steps before the clock started included


@dataclass(frozen=True)
class PhasesRecord:
    """The part on phases."""

    phase_ms: dict[Phase, float | None]  # the median of each phase over all steps; None where it holds no work
    phase_overhead: float  # the cost of the clock between the phases, relative to bare steps in blocks that take turns
    phase_sum_ms: float  # all phases of a step and the time between them: the median of the blocks with the clock


@dataclass(frozen=True)
class MemoryRecord:
    """The part on the memory of a step, in bytes."""

    batch_bytes: int | None  # inputs and targets of a batch
    peak_memory_bytes: int  # the batch, and the most that torch's allocator had handed out at a time
    peak_memory_bytes_analytic: int | None  # the same by the backend's model; None where it has no model
    memory_model: dict[str, dict[str, int]]  # mpcompare.contract.Backend.memory_model
    memory_by_op: dict[str, int]  # this and the next two: of mpcompare.instruments.meter.Peak
    memory_reserved_bytes: int | None
    graph_pool_bytes: int | None
    workspace_bytes: int | None  # memory in which matrix products compute, outside of tensors


@dataclass(frozen=True, kw_only=True)
class Result:
    """``result.json``. A part is None of a run that has not come so far, or whose record does not hold all of it."""

    status: str
    backend: str
    precision: str  # the precision that was asked for, until it is resolved
    task: str | None
    batch_size: Any  # as it was asked for, which may be the reason why the run failed
    seed: Any  # the same
    config: dict[str, Any]  # the whole configuration; a finished run's is a :class:`Config`
    error: str = ""  # the reason why the run did not finish; empty where it is not known
    wrong_input: bool = False  # whether its input is the reason, which was found before a step was taken
    sweep: str | None = None  # a hash of the folder of its sweep
    set_up: SetUpRecord | None = None
    machine: ProvenanceRecord | None = None
    resumed_from: ResumeFields | None = None  # None where training began at its beginning
    went_on: WentOn | None = None  # None unless the run goes on with one of a sweep that was killed
    training: TrainingRecord | None = None
    module_dtypes: dict[str, dict[str, str]] | None = None  # mpcompare.contract.Backend.module_dtypes
    examined: ExaminedRecord | None = None
    blocks: BlocksRecord | None = None
    compared: ComparedRecord | None = None
    phases: PhasesRecord | None = None
    memory: MemoryRecord | None = None
    inference: InferenceFields | None = None


@dataclass(frozen=True, kw_only=True)
class Finished(Result):
    """The record of a run that finished."""

    batch_size: int | None
    seed: int | None
    set_up: SetUpRecord
    machine: ProvenanceRecord
    training: TrainingRecord
    blocks: BlocksRecord
    phases: PhasesRecord
    memory: MemoryRecord


PARTS: dict[str, Any] = {
    "set_up": SetUpRecord, "machine": ProvenanceRecord, "training": TrainingRecord, "examined": ExaminedRecord,
    "blocks": BlocksRecord, "compared": ComparedRecord, "phases": PhasesRecord, "memory": MemoryRecord,
}  # fmt: skip
# The types of all fields, by their names in the file; the last two are tables that may hold more.
TYPES = {name: of for part in (Finished, *PARTS.values()) for name, of in get_type_hints(part).items()}
TYPES = {name: of for name, of in TYPES.items() if name not in PARTS}
TYPES |= {"format_version": int, "config": Config, "module_dtypes": dict[str, LayerFields]}


def check_field(name: str, value: object) -> None:
    """Raises InputError, which names the part that is wrong, unless a field of a result has its type. A field that is
    not known may hold anything."""
    check_type(name, value, TYPES.get(name, Any))
