"""The subject of an examination: a maker of backends, the network, and the task."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import cached_property
from itertools import islice
from types import MappingProxyType

from torch import Tensor, nn

from mpcompare.checkpoints import Checkpoint
from mpcompare.clean_process import CleanProcess
from mpcompare.contract import Backend, Batches, promises_of
from mpcompare.loss_scale import LossScale, load_state
from mpcompare.precision import Precision
from mpcompare.promises import NOTHING, Promises
from mpcompare.shared import ALONE, Shared
from mpcompare.tasks.draws import with_shared_masks
from mpcompare.tasks.groups import by_names
from mpcompare.tasks.task import Params, Task, with_values
from mpcompare.verdict.examine.exact_values import ExactValues, Lent, Problem
from mpcompare.verdict.examine.loss_scale import promised_scaling
from mpcompare.verdict.examine.oracle import Exact, oracle
from mpcompare.verdict.examine.update_rule import UpdateRule
from mpcompare.verdict.judge.held_out import HeldOut

GIVEN: Mapping[str, Tensor] = MappingProxyType({})  # by name


@dataclass(frozen=True)
class Subject:
    """Everything that the passes of an examination need."""

    # makes a new backend from a network with initial weights and a loss scale, both of which it copies
    make_backend: Callable[[nn.Module, LossScale], Backend]
    model: nn.Module  # the network with its initial weights, fp32 on the device
    scaling: LossScale  # the loss scale as it starts
    precision: Precision  # the precision in which the backends compute
    task: Task
    batches: Callable[[], Iterator[Batches]]  # the training batches from the first on
    # the fingerprints of the network and of the first batch before any backend had them; empty if none were taken
    lent: Lent = field(default_factory=dict)
    start: Checkpoint | None = None  # the checkpoint where training continued; None: it began at the initial weights
    # evaluates a network with these parameters and buffers on held-out samples; None where there are none
    held_out: Callable[[Params, Params], HeldOut] | None = None
    shared: Shared = ALONE  # values of the whole race: the oracle of the first step is the same for all entrants
    # a process in which no backend has been, where these values are computed; None: they are computed here
    clean: CleanProcess | None = None
    seed: int = 0  # the seed of the run, on which the random numbers of its training steps depend

    def network(self, params: Mapping[str, Tensor] = GIVEN, buffers: Mapping[str, Tensor] = GIVEN) -> nn.Module:
        """Returns a copy of the network with these parameters and buffers; all others are the initial ones."""
        return with_values(self.model, params, buffers)

    def held_out_by(self, backend: Backend) -> HeldOut | None:
        """Returns loss and accuracy on held-out samples of the weights and buffers that a backend has now."""
        return self.held_out(backend.master_params(), backend.buffers()) if self.held_out else None

    def __post_init__(self) -> None:
        # A replay is given parts of tensors: it knows the parameters of a group by their names.
        optimizer = by_names(self.task.optimizer, self.model.named_parameters())
        object.__setattr__(self, "task", replaced(self.task, optimizer=optimizer))

    @cached_property
    def examined(self) -> nn.Module:
        """The network of the first passes, whose masks all backends share."""
        return with_shared_masks(self.model)

    @cached_property
    def first_batches(self) -> list[Batches]:
        """The first batches of training, four at the most."""
        return list(islice(self.batches(), 4))

    @property
    def first_batch(self) -> Batches:
        """The first batch of training."""
        return self.first_batches[0]

    @cached_property
    def exact_values(self) -> ExactValues:
        """The exact values of the first batch at the initial weights, which all entrants share."""
        problem = Problem(self.examined, self.task.loss_fn, self.first_batch)
        return ExactValues(problem, self.shared, self.clean, self.lent)

    @cached_property
    def exact(self) -> Exact:
        """The oracle's step on the first batch."""
        return oracle(self.exact_values, self.precision)

    @property
    def first_lr(self) -> float:
        """The learning rate of the first step."""
        return float(self.task.new_rates().now)

    def rule_of(self, backend: Backend) -> UpdateRule:
        """Returns the updates that a backend promises to make."""
        return UpdateRule(self.task, self.precision, promises_of(backend))

    def scaling_at_start(self, promises: Promises = NOTHING) -> LossScale:
        """Returns the loss scale before the first step of training, of a backend that promises this."""
        scaling = promised_scaling(self.scaling, promises)
        if self.start is not None:
            load_state(scaling, self.start.state["loss_scale"])
        return scaling
