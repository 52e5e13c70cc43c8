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
    """The distance of a timed block's tensors from the trained backend's."""

    difference: float
    moved: float
    norm: float


class ResumeFields(TypedDict):
    """The checkpoint at which training began."""

    path: str
    step: int
    backend: str
    precision: str
    weights: str


class StartFields(TypedDict):
    """The fields that every record has from its start."""

    format_version: int
    status: str
    backend: str
    precision: str
    task: str | None
    batch_size: int | None
    seed: int | None
    config: Config


class Result(StartFields, total=False):
    """``result.json``; fields that nobody reads may be there, too."""

    error: str
    sweep: str | None
    engine: str
    loss_scale: str
    construct_s: float
    dataset: str
    dataset_reason: str
    dataset_fingerprint: str
    initial_weights: str
    not_finite: str
    device: str
    device_name: str
    host: str | None
    threads: int | None
    cpu_count: int | None
    platform: str | None
    python: str | None
    versions: dict[str, str | None]
    cuda: str | None
    driver: str | None
    flags: dict[str, bool | str | None]
    environment: dict[str, str]
    commit: str | None
    resumed_from: ResumeFields
    first_step_ms: float
    skipped_steps: int
    final_loss: float
    final_loss_scale: float
    dtypes: dict[str, str]
    rss_before_bytes: int | None
    peak_rss_bytes: int | None
    test_loss: float | None
    test_accuracy: float | None
    module_dtypes: dict[str, LayerFields]
    examine_s: float
    examine_foretold_bytes: int | None
    examine_peak_bytes: int | None
    examine_refused: str
    examine_stopped: str
    timed_loss: float
    timed_loss_difference: float
    timed_state: dict[str, Distance]
    timed_steps: int
    timed_unfinished: int
    step_ms_p20: float
    step_ms_p50: float
    step_ms_p80: float
    samples_per_s: float
    flops_per_step: int | None
    tflops: float | None
    timing: Timing
    phase_ms: dict[Phase, float | None]
    phase_overhead: float
    phase_sum_ms: float
    batch_bytes: int | None
    peak_memory_bytes: int
    peak_memory_bytes_analytic: int | None
    memory_model: dict[str, dict[str, int]]
    memory_by_op: dict[str, int]
    memory_reserved_bytes: int | None
    graph_pool_bytes: int | None
    workspace_bytes: int | None
    inference: InferenceFields


TYPES: dict[str, Any] = get_type_hints(Result)


def check_field(name: str, value: object) -> None:
    """Raises InputError, which names the part that is wrong, unless a field of a result has its type. A field that is
    not known may hold anything."""
    check_type(name, value, TYPES.get(name, Any))
