"""The contract as a test: ``check_backend(MyBackend)`` in the tests of any package that has a backend.

A package of your own needs three things. A class as ``mpcompare/contract.py`` says; this in its ``pyproject.toml``,
which makes ``backend=my_amp`` known to ``python -m mpcompare``:

    [project.entry-points."mpcompare.backends"]
    my_amp = "my_amp.backend:MyAmp"

and this in its tests:

    from mpcompare.testing import check_backend
    from my_amp.backend import MyAmp

    def test_contract():
        check_backend(MyAmp)

The checks run on small networks: an MLP, a CNN with batch norm, a transformer. Those that look at the interface come
first. Where all of them hold, the backend is trained and examined as in a race, and gets the verdict beside torch's
own implementation in the same precision.
"""

import copy
import inspect
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from mpcompare import loss_scale
from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.tf32 import Tf32
from mpcompare.contract import PHASES, Backend, BackendUnavailable, Batches, Stepper, options_of, show_gradients
from mpcompare.cost.memory import TENSOR_KINDS
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from mpcompare.measure import machine, numerics
from mpcompare.measure.examine import Subject, examine
from mpcompare.measure.oracle import exact_step
from mpcompare.precision import DTYPES, resolve_precision
from mpcompare.records import BLOCK_FIELDS, Run, finite, numbers
from mpcompare.report.judge.verdict import judge_run
from mpcompare.tasks.data import Dataset, batches
from mpcompare.tasks.data.generated import digits, synthetic
from mpcompare.tasks.mlp import Mlp
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Params, Task, buffers_of, params_of
from mpcompare.tasks.text import CharGpt
from mpcompare.tasks.twin import examined_twin

Tasks = Mapping[str, tuple[Task, Dataset]]
ANSWERS = (
    "master_params", "buffers", "grads", "loss_scale", "dtypes", "state_dict", "load_state_dict", "module_dtypes",
    "memory_model",
)  # fmt: skip
OBSERVED = ("params", "activations", "gradients", "loss", "optimizer")  # the keys of dtypes()
STEPS = 8  # of the training that is judged


@dataclass(frozen=True)
class Checked:
    """What :func:`check_backend` did.

    Attributes:
        columns: each task and precision that was checked, ``mlp bf16``.
        skipped: what was not, and why: a task and precision, or one check there, ``mlp bf16, overflow``.
    """

    columns: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class BrokenContract(AssertionError):  # noqa: N818 - said as it is, like BackendUnavailable
    """The rules that a backend breaks, a line each.

    Attributes:
        rules: each broken rule in a sentence, with the tasks and precisions in which it is broken.
    """

    def __init__(self, name: str, rules: list[str]) -> None:
        self.rules = rules
        count = "one rule" if len(rules) == 1 else f"{len(rules)} rules"
        super().__init__("\n  ".join([f"{name} breaks {count} of the contract:", *rules]))


def check_backend(
    backend_class: Any,
    *,
    precision: str | None = None,
    device: str = "cpu",
    tasks: Tasks | None = None,
    **options: Any,
) -> Checked:
    """Checks a backend's class against the contract.

    Args:
        backend_class: as ``mpcompare/contract.py`` describes it.
        precision: one of its ``PRECISIONS``, or ``auto``; None: all of them, without tf32 on a CPU.
        device: ``cpu``, ``cuda``, or ``auto``.
        tasks: by name, a task and its data of at least 10 batches; None: :func:`small_tasks`. Those that the backend
            says it cannot train (``BackendUnavailable``) are skipped.
        options: its own, for its constructor.

    Returns:
        What was checked, and what was skipped.

    Raises:
        BrokenContract: it breaks rules (all are listed), or nothing could be checked.
        InputError: a precision that it does not have, or a device that is not there.
    """
    name = getattr(backend_class, "__name__", str(backend_class))
    if broken := list(_class(backend_class, options)):
        raise BrokenContract(name, broken)
    where = machine.select_device(device)
    if precision is not None:
        precision = resolve_precision(precision, backend_class.PRECISIONS, where, name)
    checked = Checked()
    found: dict[str, list[str]] = {}
    for task_name, (task, dataset) in (small_tasks() if tasks is None else tasks).items():
        for each in backend_class.PRECISIONS if precision is None else (precision,):
            column = _Column(backend_class, options, task_name, task, dataset.to(where), each, where)
            if each == "tf32" and where.type != "cuda":
                checked.skipped[column.name] = "tf32 needs a CUDA GPU"
                continue
            with machine.tf32(each == "tf32"):
                for sentence in _check(column, checked):
                    found.setdefault(sentence, []).append(column.name)
    rules = [f"{sentence} ({', '.join(columns)})" for sentence, columns in found.items()]
    if not rules and not checked.columns:
        reasons = "; ".join(dict.fromkeys(checked.skipped.values()))
        rules = [f"nothing could be checked: {reasons or 'there is no task'}"]
    if rules:
        raise BrokenContract(name, rules)
    return checked


def small_tasks() -> dict[str, tuple[Task, Dataset]]:
    """What a backend is checked on, each with 12 batches: ``mlp``, ``cnn`` and ``transformer``. They train with
    momentum, so that the optimizer has a state."""
    optimizer = Sgd(0.1, 0.9)
    mlp = Task(partial(Mlp, 20, [24, 16], 5), "cross_entropy", optimizer, 32, 32 * 12)
    cnn = Task(_cnn, "cross_entropy", optimizer, 16, 16 * 12)
    gpt = Task(partial(CharGpt, vocabulary=16, length=8, width=32, heads=2, blocks=1), "cross_entropy", optimizer, 32)
    return {
        "mlp": (mlp, synthetic(0, 32 * 12, 20, 5, "cross_entropy")),
        "cnn": (cnn, digits(0, 16 * 12)),
        "transformer": (gpt, _tokens(32 * 12)),
    }


def _cnn() -> nn.Module:
    """``[N, 1, 28, 28]`` to ``[N, 10]``. A bias before a batch norm has no gradient, so the convolutions have none."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 7 * 7, 10),
    )  # fmt: skip


def _tokens(samples: int) -> Dataset:
    """Ids ``[samples, 8]`` below 16, of which each is mostly three times the one before it plus 1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(16, (samples, 9), generator=generator)
    noise *= torch.rand(samples, 9, generator=generator) < 0.2
    ids = [torch.randint(16, (samples,), generator=generator)]
    for extra in noise.T[1:]:
        ids.append((3 * ids[-1] + 1 + extra) % 16)
    tokens = torch.stack(ids, dim=1)
    x, y = tokens[:, :-1], tokens[:, 1:]
    return Dataset("tokens", "asked for", x, y, x[:16], y[:16])


# ---- one task in one precision


@dataclass(frozen=True)
class _Column:
    backend_class: Any
    options: Mapping[str, Any]
    task_name: str
    task: Task
    dataset: Dataset
    precision: str
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.task_name} {self.precision}"

    def model(self, seed: int = 0) -> nn.Module:
        return self.task.new_model(seed, self.device)

    def make(self, model: nn.Module, policy: LossScale) -> Any:
        return self.backend_class(model, self.task, self.precision, copy.deepcopy(policy), **self.options)

    def batches(self, count: int) -> list[Batches]:
        """Of so many steps, each as its micro-batches."""
        stream = islice(batches(self.dataset, self.task.batch_size), count)
        return [self.task.micro_batches(x, y) for x, y in stream]

    def step(self, backend: Any, batch: Batches) -> Tensor:
        """A step at the task's learning rate."""
        return Stepper(backend, self.task.new_rates()).step(batch)

    def policy(self) -> LossScale:
        """The one that ``loss_scale=auto`` gives, or the first other that the backend accepts; raises InputError."""
        refused: InputError | None = None
        for policy in (loss_scale.auto(self.precision), *POLICIES):
            try:
                self.make(self.model(), policy)
            except InputError as error:
                refused = refused or error
            else:
                return policy
        assert refused is not None
        raise refused

    def new(self, seed: int = 0) -> Any:
        return self.make(self.model(seed), self.policy())


POLICIES: tuple[LossScale, ...] = (
    NoLossScale(),
    StaticLossScale(256.0),
    DynamicLossScale(256.0, growth_interval=2),
)


def _check(column: _Column, checked: Checked) -> Iterator[str]:
    try:
        backend = column.new()
    except BackendUnavailable as error:
        checked.skipped[column.name] = str(error)
        return
    except Exception as error:
        yield f"the constructor raises {_said(error)}"
        return
    checked.columns.append(column.name)
    if broken := list(_interface(backend)):
        yield from broken
        return
    clean = True
    for rule in (_leaves_the_model_alone, _loss, _parameters, _gradients, _policies, _answers, _state, _two_at_once):
        for sentence in _all_of(rule, column, checked):
            clean = False
            yield sentence
    if clean:
        yield from _all_of(_verdict, column, checked)


def _all_of(rule: Callable[[_Column, Checked], Iterator[str]], column: _Column, checked: Checked) -> Iterator[str]:
    """What the rule finds; a backend that raises has broken it."""
    try:
        yield from rule(column, checked)
    except Exception as error:
        yield f"{(rule.__doc__ or '').splitlines()[0].rstrip('.')}: raises {_said(error)}"


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# ---- the rules: each yields a sentence for everything that is not as it should be


def _class(backend_class: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """The class: its precisions, its constructor's arguments."""
    if not isinstance(backend_class, type):
        yield "it is no class"
        return
    precisions = getattr(backend_class, "PRECISIONS", None)
    if not isinstance(precisions, tuple) or not precisions or not set(precisions) <= set(DTYPES):
        yield f"PRECISIONS is {precisions!r}, expected a tuple of {', '.join(DTYPES)}"
    parameters = list(inspect.signature(backend_class).parameters.values())
    if [p.name for p in parameters[:4]] != ["model", "task", "precision", "loss_scale"]:
        found = ", ".join(p.name for p in parameters[:4])
        yield f"the constructor takes {found or 'nothing'}, expected model, task, precision, loss_scale, then options"
    for p in parameters[4:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            yield f"the constructor takes {p}, expected each option by name, so that a wrong one can be refused"
        elif p.default is p.empty:
            yield f"option {p.name} has no default"
    own = options_of(backend_class)
    for name in options:
        if name not in own:
            yield f"option {name} was given, and the constructor does not take it"


def _interface(backend: Any) -> Iterator[str]:
    """The methods: all phases or one step, and all answers."""
    phases = [name for name in PHASES if callable(getattr(backend, name, None))]
    missing = [name for name in PHASES if name not in phases]
    whole = callable(getattr(backend, "train_step", None))
    if phases and missing:
        yield f"it offers {', '.join(phases)} and not {', '.join(missing)}: expected all phases, or none and train_step"
    elif not phases and not whole:
        yield f"it offers no step: expected {', '.join(PHASES)}, or train_step"
    elif not whole:
        idle = getattr(backend, "IDLE_PHASES", None)
        if not isinstance(idle, tuple) or not set(idle) <= set(PHASES):
            yield f"IDLE_PHASES is {idle!r}, expected a tuple of phases"
    for name in ANSWERS:
        if not callable(getattr(backend, name, None)):
            yield f"{name}() is missing"
    if not isinstance(getattr(backend, "engine", None), str):
        yield f"engine is {getattr(backend, 'engine', None)!r}, expected a string"
    if not _is_skipped(getattr(backend, "skipped", None)):
        yield f"skipped is {getattr(backend, 'skipped', None)!r}, expected a bool or a 0-d tensor"


def _is_skipped(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, Tensor) and value.dim() == 0)


def _leaves_the_model_alone(column: _Column, checked: Checked) -> Iterator[str]:
    """It starts from the model's weights, and does not write to the model."""
    model, as_it_was = column.model(), column.model()
    backend = column.make(model, column.policy())
    for what, mine, theirs in (
        ("parameters", backend.master_params(), params_of(as_it_was)),
        ("buffers", backend.buffers(), buffers_of(as_it_was)),
    ):
        if any(name in mine and not numerics.same_bits(mine[name], theirs[name]) for name in theirs):
            yield f"its first {what} are not those of the model, bit for bit"
    for batch in column.batches(2):
        column.step(backend, batch)
    for what, found, expected in (
        ("parameters", params_of(model), params_of(as_it_was)),
        ("buffers", buffers_of(model), buffers_of(as_it_was)),
    ):
        if any(name not in found or not numerics.same_bits(found[name], expected[name]) for name in expected):
            yield f"it writes to the {what} of the model that it was given: expected a copy"
    if any(p.grad is not None for p in model.parameters()):
        yield "it leaves gradients in the model that it was given: expected a copy"
    if not model.training:
        yield "it takes the model that it was given out of training mode: expected a copy"


def _loss(column: _Column, checked: Checked) -> Iterator[str]:
    """The loss is an fp32 scalar on the device, unscaled."""
    for policy in _accepted(column, StaticLossScale(256.0), NoLossScale()):
        batch = column.batches(1)[0]
        loss = column.step(column.make(column.model(), policy), batch)
        if not isinstance(loss, Tensor):
            yield f"the loss is a {type(loss).__name__}, expected a tensor"
            continue
        if loss.dim() or loss.dtype is not torch.float32 or loss.device.type != column.device.type:
            kind = f"{list(loss.shape)} {_dtype(loss)} on {loss.device.type}"
            yield f"the loss is a tensor {kind}, expected [] fp32 on {column.device.type}"
        exact = _exact(column)
        if loss.numel() == 1 and not abs(float(loss) - exact.loss) <= 0.25 * abs(exact.loss):
            times = float(loss) / exact.loss
            yield f"the loss is {times:.3g} times the exact one at loss scale {policy.scale:g}: expected it unscaled"


def _parameters(column: _Column, checked: Checked) -> Iterator[str]:
    """Master parameters and buffers have the model's names and shapes; parameters are fp32."""
    backend, model = column.new(), column.model()
    column.step(backend, column.batches(1)[0])
    yield from _named("master_params()", backend.master_params(), params_of(model), torch.float32)
    yield from _named("buffers()", backend.buffers(), buffers_of(model), None)


def _gradients(column: _Column, checked: Checked) -> Iterator[str]:
    """Gradients have the parameters' names and shapes, are fp32 and unscaled."""
    exact = _exact(column).grads
    for policy in _accepted(column, StaticLossScale(256.0), NoLossScale()):
        backend = column.make(column.model(), policy)
        grads = _first_gradients(column, backend)
        if not grads:
            checked.skipped[f"{column.name}, gradients"] = "grads() is empty"
            return
        broken = list(_named("grads()", grads, exact, torch.float32))
        yield from broken
        if not broken:
            norm, expected = (math.hypot(*(g.double().norm().item() for g in each.values())) for each in (grads, exact))
            if not expected / 2 <= norm <= 2 * expected:
                times = f"{norm / expected:.3g} times the exact ones at loss scale {policy.scale:g}"
                yield f"grads() are {times}: expected them unscaled"


def _policies(column: _Column, checked: Checked) -> Iterator[str]:
    """The loss scale follows its policy, and a skipped step leaves every parameter bit for bit."""
    stream, real = column.batches(6), column.dataset.x_train.is_floating_point()
    if not real:
        checked.skipped[f"{column.name}, overflow"] = "its inputs are integers, of which none makes a gradient infinite"
    for policy in _accepted(column, *POLICIES):
        backend, name = column.make(column.model(), policy), f"loss_scale={policy.name}"
        policy = copy.deepcopy(policy)
        wrong = set()
        for number, batch in enumerate(stream):
            overflows = real and number == 3
            if overflows:
                batch = [(torch.full_like(x, math.inf), y) for x, y in batch]
            scale, before = float(backend.loss_scale()), _copy(backend.master_params())
            if scale != policy.scale:
                wrong.add(f"{name}: loss_scale() is {scale:g} where the policy says {policy.scale:g}")
                break
            column.step(backend, batch)
            skips = overflows and not isinstance(policy, NoLossScale)
            if not _is_skipped(backend.skipped):
                wrong.add(f"skipped is {backend.skipped!r}, expected a bool or a 0-d tensor")
            elif bool(backend.skipped) != skips:
                kind = "infinite" if overflows else "finite"
                wrong.add(f"{name}: skipped is {bool(backend.skipped)} after a step with {kind} gradients")
            moved = any(not numerics.same_bits(before[key], after) for key, after in backend.master_params().items())
            if skips and moved:
                wrong.add(f"{name}: a step with infinite gradients changes parameters")
            if not overflows and not moved:
                wrong.add(f"{name}: a step with finite gradients changes no parameter")
            policy.update(skips)
            if overflows and not skips:
                break  # everything is NaN from here on
        yield from sorted(wrong)


def _answers(column: _Column, checked: Checked) -> Iterator[str]:
    """dtypes() and memory_model() have the keys that the report reads."""
    backend = column.new()
    column.step(backend, column.batches(1)[0])
    dtypes = backend.dtypes()
    if set(dtypes) != set(OBSERVED) or not all(isinstance(name, str) for name in dtypes.values()):
        yield f"dtypes() is {dtypes}, expected a name for each of {', '.join(OBSERVED)}"
    model = backend.memory_model()
    if unknown := [kind for kind in model if kind not in TENSOR_KINDS]:
        yield f"memory_model() has the kinds {', '.join(map(str, unknown))}, expected some of {', '.join(TENSOR_KINDS)}"
    sizes = [size for tensors in model.values() for size in tensors.values()]
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        yield "memory_model() has sizes that are no whole numbers of bytes"


def _state(column: _Column, checked: Checked) -> Iterator[str]:
    """A new backend that loads a state continues bit for bit."""
    stream = column.batches(8)
    policy = next(_accepted(column, DynamicLossScale(256.0, growth_interval=3), StaticLossScale(256.0), NoLossScale()))
    first = column.make(column.model(), policy)
    for batch in stream[:2]:
        column.step(first, batch)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    ways = {
        "copy.deepcopy": copy.deepcopy(first.state_dict()),
        "torch.save and torch.load": torch.load(file, weights_only=False),
    }
    expected = list(_go_on(column, first, stream[2:]))
    for way, state in ways.items():
        loaded = column.make(column.model(seed=1), policy)  # other weights: what the state lacks shows
        loaded.load_state_dict(state)
        different = _first_difference(expected, list(_go_on(column, loaded, stream[2:])), column.device)
        if different:
            yield f"a backend that loads a state (by {way}) continues with {different}"


def _two_at_once(column: _Column, checked: Checked) -> Iterator[str]:
    """Two backends of one process do not disturb each other."""
    stream = column.batches(8)
    alone = list(_go_on(column, column.new(), stream[:4]))
    one, other = column.new(), column.new(seed=1)
    found: list[dict[str, Tensor]] = []
    for mine, theirs in zip(stream[:4], stream[4:], strict=True):
        found += _go_on(column, one, [mine])
        column.step(other, theirs)
    if different := _first_difference(alone, found, column.device):
        yield f"beside another backend of the same process it computes {different}"


def _verdict(column: _Column, checked: Checked) -> Iterator[str]:
    """It computes the same as torch's own implementation, as far as the verdict can tell."""
    peer = {"fp32": Fp32, "tf32": Tf32}.get(column.precision, Amp)
    policy = column.policy()
    train = partial(
        examined_run, task=column.task, dataset=column.dataset, precision=column.precision, policy=policy, steps=STEPS,
        device=column.device.type,
    )  # fmt: skip
    try:
        reference = train("reference", peer, noise=2)
    except (BackendUnavailable, InputError) as error:
        checked.skipped[f"{column.name}, verdict"] = f"there is no reference: {error}"
        return
    verdict = judge_run(train("it", column.backend_class, options=column.options), reference)
    if verdict.word not in ("same", "within noise"):
        yield f"beside {peer.__name__} the verdict is {verdict}: {verdict.because}"


# ---- what the rules share


def _accepted(column: _Column, *policies: LossScale) -> Iterator[LossScale]:
    """Those that the backend does not refuse with an InputError."""
    for policy in policies:
        try:
            column.make(column.model(), policy)
        except InputError:
            continue
        yield policy


def _exact(column: _Column) -> Any:
    return exact_step(column.model(), column.task.loss_fn, column.batches(1)[0], column.precision)


def _first_gradients(column: _Column, backend: Any) -> Params:
    return _copy(show_gradients(backend, column.batches(1)[0], column.task.optimizer.lr)[1])


def _named(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: Any) -> Iterator[str]:
    """Names, shapes and dtype of ``found`` beside those of ``expected``."""
    if missing := [name for name in expected if name not in found]:
        yield f"{what} lack {', '.join(missing)}"
    if unknown := [name for name in found if name not in expected]:
        yield f"{what} have {', '.join(unknown)}, which the model has not"
    for name, tensor in found.items():
        if name in expected and tensor.shape != expected[name].shape:
            yield f"{what}: {name} is {list(tensor.shape)}, expected {list(expected[name].shape)}"
    if wrong := {_dtype(tensor) for tensor in found.values() if dtype is not None and tensor.dtype is not dtype}:
        yield f"{what} are {', '.join(sorted(wrong))}, expected {str(dtype).removeprefix('torch.')}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _copy(tensors: Mapping[str, Tensor]) -> Params:
    return {name: t.detach().clone() for name, t in tensors.items()}


def _go_on(column: _Column, backend: Any, stream: list[Batches]) -> Iterator[dict[str, Tensor]]:
    """What each step leaves: loss, loss scale, parameters and buffers."""
    for batch in stream:
        loss = column.step(backend, batch).detach().clone()
        tensors = {**_copy(backend.master_params()), **_copy(backend.buffers())}
        yield {"another loss": loss, "another loss scale": torch.tensor(float(backend.loss_scale())), **{
            f"another {name}": tensor for name, tensor in tensors.items()
        }}  # fmt: skip


def _first_difference(expected: list[dict[str, Tensor]], found: list[dict[str, Tensor]], device: torch.device) -> str:
    """``another loss in step 2``; empty where there is none. On CUDA sums may be taken in another order."""
    for number, (a, b) in enumerate(zip(expected, found, strict=True), start=1):
        for name, tensor in a.items():
            near = device.type == "cuda" and _near(tensor, b[name])
            if not near and not numerics.same_bits(tensor, b[name]):
                return f"{name} in step {number}"
    return ""


def _near(a: Tensor, b: Tensor) -> bool:
    """Within 1e-6 of the norm."""
    return (a.double() - b.double()).norm().item() <= 1e-6 * a.double().norm().item()


# ---- a run that is examined


def examined_run(
    name: str,
    backend_class: Any,
    task: Task,
    dataset: Dataset,
    precision: str,
    seed: int = 0,
    policy: LossScale | None = None,
    steps: int = 20,
    noise: int = 0,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
) -> Run:
    """Trains and examines in this process; nothing is timed.

    Args:
        name: of the run and its backend.
        dataset: on any device.
        policy: the loss scale; None: what ``loss_scale=auto`` gives.
        noise: how many more runs measure the noise: two for one that others are judged beside.
        options: the backend's own.

    Returns:
        The run, as its record would be read back.
    """
    task = task.over(steps)
    model = task.new_model(seed, torch.device(device))
    dataset = dataset.to(torch.device(device))
    policy = policy or loss_scale.auto(precision)

    def make(model: nn.Module, policy: LossScale) -> Backend:
        return backend_class(model, task, precision, copy.deepcopy(policy), **(options or {}))

    def stream() -> Iterator[Batches]:
        return (task.micro_batches(x, y) for x, y in batches(dataset, task.batch_size))

    backend = make(model, policy)
    stepper = Stepper(backend, task.new_rates())
    rows = []
    for number, batch in enumerate(islice(stream(), steps), start=1):
        scale = float(backend.loss_scale())
        loss = float(stepper.step(batch))
        rows.append({"step": number, "loss": loss, "loss_scale": scale, "skipped": bool(backend.skipped)})
    initial = params_of(model)
    moved = numerics.sketch({name: p - initial[name] for name, p in backend.master_params().items()})
    twin, replaced = examined_twin(model, task)
    subject = Subject(
        make, model, policy, precision, task, stream, twin, replaced,
    )  # fmt: skip
    turns = examine(subject, stepper, rows, noise)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found = numbers(json.loads(json.dumps(finite({"moved": moved, **end.value}))))
            break
    result = {
        "status": "ok", "backend": name, "precision": precision, "seed": seed, "dtypes": backend.dtypes(),
        "config": {"task": {}}, "task": "task", "batch_size": task.batch_size,
    }  # fmt: skip
    return Run(Path(name), name, result, pd.DataFrame(rows), pd.DataFrame(columns=list(BLOCK_FIELDS)), found)
