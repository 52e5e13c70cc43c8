"""The fields of ``result.json`` and their types: for those who write a record, and for those who read anybody's.

Backends of strangers answer some of them, and records come from anywhere. A report is drawn from many records, and one
wrong value must cost no other run.
"""

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


class Timing(TypedDict):
    """``mpcompare.race.turns.Finish``."""

    rounds: int
    stopped: str
    half_width: float
    seconds: float
    race: str | None
    compared: int


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


class WayFields(TypedDict, total=False):
    """The numbers of one way of inference, or the reason why there are none."""

    test_loss: float | None
    test_accuracy: float | None
    latency_ms: float
    latency_ms_p20: float
    latency_ms_p80: float
    samples_per_s: float
    peak_memory_bytes: int
    weight_bytes: int
    unavailable: str


class InferenceAtLeast(TypedDict):
    batch_size: int


class InferenceFields(InferenceAtLeast, total=False):
    """The ways of inference by their names."""

    ways: dict[str, WayFields]


class Distance(TypedDict):
    """The distance between two ends of one block, of tensors of one kind together."""

    difference: float  # between what the timed backend and the trained one left
    moved: float  # between the start and the end of the block, of the trained one
    norm: float  # of what that one left


class ResumeFields(TypedDict):
    """The checkpoint at which training began."""

    path: str
    step: int
    backend: str | None  # None: the checkpoint does not say it
    precision: str | None
    weights: str  # a hash of them


# The record, part by part: those who write it say which part it is.


class StartFields(TypedDict):
    """The part that every record has from its start."""

    format_version: int
    status: str
    backend: str
    precision: str
    task: str | None
    batch_size: int | None
    seed: int | None
    config: Config


class MoreOfStart(StartFields, total=False):
    """The part with which a record begins, and ends."""

    error: str
    sweep: str | None


class SetUpRecord(TypedDict):
    """The part on what is made once."""

    precision: str  # resolved
    engine: str  # the answer of a new backend to what computes its products
    loss_scale: str  # the name of its kind
    construct_s: float  # in which the first backend was made
    dataset: str
    dataset_reason: str  # why it was taken
    dataset_fingerprint: str
    initial_weights: str  # a hash of them
    not_finite: str  # mpcompare.entrant.setup.Setup.not_finite


class ProvenanceRecord(TypedDict):
    """The part on the machine and its state, as far as a result may depend on them."""

    device: str  # cpu or cuda
    device_name: str
    host: str | None  # a hash of its name
    threads: int | None  # the number that torch uses
    cpu_count: int | None
    platform: str | None
    python: str | None
    versions: dict[str, str | None]  # those of packages; None where one is not installed
    cuda: str | None  # None on a CPU, as the driver
    driver: str | None
    flags: dict[str, bool | str | None]  # those of torch's matrix products
    environment: dict[str, str]  # variables that change speed without being seen in the configuration
    commit: str | None  # that of this project, with -dirty where files differ from it; None where it is not known


class ResumedRecord(TypedDict):
    """The part that only a run has which continues from a checkpoint."""

    resumed_from: ResumeFields


class TrainingRecord(TypedDict):
    """The part on training."""

    first_step_ms: float
    skipped_steps: int  # those that updated nothing
    final_loss: float  # of the last step
    final_loss_scale: float  # after it
    engine: str  # the answer of the trained backend
    dtypes: dict[str, str]  # observed in the last step
    rss_before_bytes: int | None  # the resident set before training; None where it is not known
    peak_rss_bytes: int | None  # and at most during it
    test_loss: float | None  # on the held-out samples
    test_accuracy: float | None


class ObservedRecord(TypedDict):
    """The part on the layers."""

    module_dtypes: dict[str, LayerFields]  # mpcompare.contract.Backend.module_dtypes


class ExaminedRecord(ObservedRecord):
    """The part of a run that was examined."""

    examine_s: float  # that it took
    examine_foretold_bytes: int | None  # the memory that it was foretold to take; None where that is not known
    examine_peak_bytes: int | None  # the most memory that it took; None where that is not known
    examine_refused: str  # why it did not begin, in a line: the machine has not that much; empty where it did
    examine_stopped: str  # the error with which all of it stopped, so that nothing was found; empty where none did


class BlocksRecord(TypedDict):
    """The part on timed blocks."""

    step_ms_p20: float  # milliseconds a step, quantiles of the blocks
    step_ms_p50: float
    step_ms_p80: float
    samples_per_s: float  # by the median
    flops_per_step: int | None  # operations of the products; None where they are not known
    tflops: float | None  # 1e12 of them a second
    timing: Timing
    timed_unfinished: int  # mpcompare.entrant.timing.Blocks.unfinished


class ComparedRecord(BlocksRecord):
    """The part of a run that was examined: a timed block, the one that the race drew, and the trained backend's."""

    timed_loss: float  # the trained backend's in the last step
    timed_loss_difference: float  # the larger of the differences in the first step and in the last
    timed_state: dict[str, Distance]  # by kind
    timed_steps: int  # of the block, those before the clock started included


class PhasesRecord(TypedDict):
    """The part on phases."""

    phase_ms: dict[Phase, float | None]  # the median of each phase over all steps; None where it holds no work
    phase_overhead: float  # the cost of the clock between the phases, relative to bare steps in blocks that take turns
    phase_sum_ms: float  # of all phases of a step and what lies between them: the median of the blocks with the clock


class MemoryRecord(TypedDict):
    """The part on the memory of a step, in bytes."""

    batch_bytes: int | None  # inputs and targets of a batch
    peak_memory_bytes: int  # the batch, and the most that torch's allocator had handed out at a time
    peak_memory_bytes_analytic: int | None  # the same by the backend's model; None where it has none
    memory_model: dict[str, dict[str, int]]  # mpcompare.contract.Backend.memory_model
    memory_by_op: dict[str, int]  # this and the next two: of mpcompare.instruments.meter.Peak
    memory_reserved_bytes: int | None
    graph_pool_bytes: int | None
    workspace_bytes: int | None  # memory in which matrix products compute, outside of tensors


class InferenceRecord(TypedDict):
    """The part on inference."""

    inference: InferenceFields


PARTS = (
    *(MoreOfStart, SetUpRecord, ProvenanceRecord, ResumedRecord, TrainingRecord, ExaminedRecord, ComparedRecord),
    *(PhasesRecord, MemoryRecord, InferenceRecord),
)
TYPES: dict[str, Any] = {name: of for part in PARTS for name, of in get_type_hints(part).items()}


def check_field(name: str, value: object) -> None:
    """Raises InputError, which names the part that is wrong, unless a field of a result has its type. A field that is
    not known may hold anything."""
    check_type(name, value, TYPES.get(name, Any))
