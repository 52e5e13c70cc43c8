"""The requirements of the contract on steps: each yields a sentence for everything that is not as it should be."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.tf32 import Tf32
from mpcompare.contract import BackendUnavailable, in_one_piece, promises_of, show_gradients
from mpcompare.cost import TENSOR_KINDS
from mpcompare.dtypes import torch_dtype
from mpcompare.errors import InputError
from mpcompare.loss_scale import NoLossScale, StaticLossScale
from mpcompare.precision import FORMATS
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.batch import each, tensors_of
from mpcompare.tasks.task import Params, buffers_of, params_of
from mpcompare.testing.candidate import LOSS_SCALES, Candidate, Checked
from mpcompare.testing.continuing import copy_of_all, finished, goes_on_from_a_state, two_at_once
from mpcompare.testing.examined import examined_run
from mpcompare.testing.interface import is_skipped
from mpcompare.verdict.examine import numerics
from mpcompare.verdict.examine.loss_scale import promised_scaling
from mpcompare.verdict.judge.word import Word

Requirement = Callable[[Candidate, Checked], Iterator[str]]
OBSERVED = ("params", "activations", "gradients", "loss", "optimizer")  # the keys of dtypes()
STEPS = 8  # the steps of the training that is judged
PEERS: tuple[Any, ...] = (Fp32, Tf32, Amp)  # torch's own implementations


def _leaves_the_model_alone(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """It starts from the model's weights, and writes neither to the model nor to a batch."""
    model, as_it_was = candidate.model(), candidate.model()
    backend = candidate.make(model, candidate.accepted_scaling())
    kinds = ("parameters", params_of, backend.master_params), ("buffers", buffers_of, backend.buffers)
    for what, of, answer in kinds:
        first, tensors = _stored(of(as_it_was), backend), answer()
        if any(name in tensors and not numerics.same_bits(tensors[name], first[name]) for name in first):
            yield f"its first {what} are not the model's {what}, bit for bit"
    for batch in candidate.batches(2):
        before = copy.deepcopy(batch)
        candidate.step(backend, batch)
        for what, place in (("inputs", 0), ("targets", 1)):
            was, now = ([t for micro_batch in b for t in tensors_of(micro_batch[place])] for b in (before, batch))
            if not all(map(numerics.same_bits, was, now)):
                yield f"it writes to the {what} of a batch: expected a copy"
    for what, of, _ in kinds:
        tensors, expected = of(model), of(as_it_was)
        if any(name not in tensors or not numerics.same_bits(tensors[name], expected[name]) for name in expected):
            yield f"it writes to the {what} of the model that it was given: expected a copy"
    if any(p.grad is not None for p in model.parameters()):
        yield "it leaves gradients in the model that it was given: expected a copy"
    if not model.training:
        yield "it takes the model that it was given out of training mode: expected a copy"


def _loss(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """The loss is an fp32 scalar on the device, unscaled."""
    for scaling in candidate.accepted(StaticLossScale(256.0), NoLossScale()):
        batch = candidate.batches(1)[0]
        loss = candidate.step(candidate.make(candidate.model(), scaling), batch)
        if not isinstance(loss, Tensor):
            yield f"the loss is a {type(loss).__name__}, expected a tensor"
            continue
        if loss.dim() or loss.dtype is not torch.float32 or loss.device.type != candidate.device.type:
            kind = f"{list(loss.shape)} {_dtype(loss)} on {loss.device.type}"
            yield f"the loss is a tensor {kind}, expected [] fp32 on {candidate.device.type}"
        exact = candidate.exact()
        if loss.numel() == 1 and not abs(float(loss) - exact.loss) <= 0.25 * abs(exact.loss):
            times = float(loss) / exact.loss
            yield f"the loss is {times:.3g} times the exact one at loss scale {scaling.scale:g}: expected it unscaled"


def _parameters(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """Master parameters and buffers have the model's names and shapes; parameters are fp32."""
    backend, model = candidate.new(), candidate.model()
    candidate.step(backend, candidate.batches(1)[0])
    yield from _named("master_params()", backend.master_params(), params_of(model), torch.float32)
    yield from _named("buffers()", backend.buffers(), buffers_of(model), None)


def _gradients(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """Gradients have the parameters' names and shapes, are fp32 and unscaled."""
    exact = candidate.exact().grads
    for scaling in candidate.accepted(StaticLossScale(256.0), NoLossScale()):
        backend = candidate.make(candidate.model(), scaling)
        grads = copy_of_all(show_gradients(backend, candidate.batches(1)[0], candidate.task.optimizer.lr)[1])
        if grads and in_one_piece(backend) and not any(g.any() for g in grads.values()):
            yield "grads() are 0 after train_step(): expected the step's gradients, copied before they are dropped"
            return
        if not grads:
            checked.skipped[f"{candidate.name}, gradients"] = "grads() is empty"
            return
        broken = list(_named("grads()", grads, exact, torch.float32))
        yield from broken
        if not broken:
            norm, expected = numerics.norm_of(grads), numerics.norm_of(exact)
            if not expected / 8 <= norm <= 8 * expected:  # a loss scale; the verdict names factors of micro-batches
                times = f"{norm / expected:.3g} times the exact ones at loss scale {scaling.scale:g}"
                yield f"grads() are {times}: expected them unscaled"


def _loss_scale(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """The loss scale follows its policy, and a skipped step leaves every parameter bit for bit."""
    stream, real = candidate.batches(6), candidate.dataset.x_train.is_floating_point()
    if not real:
        why = "its inputs are integers, of which none makes a gradient infinite"
        checked.skipped[f"{candidate.name}, overflow"] = why
    scalings = candidate.accepted(*LOSS_SCALES)
    if scalings[0] not in LOSS_SCALES:
        why = f"it accepts none that changes within {len(stream)} finite steps"
        checked.skipped[f"{candidate.name}, growth of the loss scale"] = why
    for scaling in scalings:
        backend, name = candidate.make(candidate.model(), scaling), f"loss_scale={scaling.name}"
        scaling = promised_scaling(scaling, promises_of(backend))  # a copy
        wrong = set()
        for number, batch in enumerate(stream):
            overflows = real and number == 3
            if overflows:
                batch = [(each(_infinite, x), y) for x, y in batch]
            scale, before = float(backend.loss_scale()), copy_of_all(backend.master_params())
            if scale != scaling.scale:
                wrong.add(f"{name}: loss_scale() is {scale:g} where the policy says {scaling.scale:g}")
                break
            candidate.step(backend, batch)
            skips = overflows and scaling.scales
            if not is_skipped(backend.skipped):
                wrong.add(f"skipped is {backend.skipped!r}, expected a bool or a 0-d tensor")
            elif bool(backend.skipped) != skips:
                kind = "infinite" if overflows else "finite"
                wrong.add(f"{name}: skipped is {bool(backend.skipped)} after a step with {kind} gradients")
            moved = any(not numerics.same_bits(before[key], after) for key, after in backend.master_params().items())
            if skips and moved:
                wrong.add(f"{name}: a step with infinite gradients changes parameters")
            if not overflows and not moved:
                wrong.add(f"{name}: a step with finite gradients changes no parameter")
            scaling.update(skips)
            if overflows and not skips:
                break  # everything is NaN from here on
        yield from sorted(wrong)


def _answers(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """dtypes() and memory_model() have the keys that the report reads."""
    backend = candidate.new()
    candidate.step(backend, candidate.batches(1)[0])
    dtypes = backend.dtypes()
    if set(dtypes) != set(OBSERVED) or not all(isinstance(name, str) for name in dtypes.values()):
        yield f"dtypes() is {dtypes}, expected a name for each of {', '.join(OBSERVED)}"
    model = backend.memory_model()
    if unknown := [kind for kind in model if kind not in TENSOR_KINDS]:
        yield f"memory_model() has the kinds {', '.join(map(str, unknown))}, expected some of {', '.join(TENSOR_KINDS)}"
    sizes = [size for tensors in model.values() for size in tensors.values()]
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        yield "memory_model() has sizes that are no whole numbers of bytes"


def verdict(candidate: Candidate, checked: Checked) -> Iterator[str]:
    """It computes the same as torch's own implementation, as far as the verdict can tell."""
    peer = next(each for each in PEERS if candidate.precision in each.PRECISIONS)
    scaling = candidate.accepted_scaling()
    train = partial(examined_run, scaling=scaling, steps=STEPS)
    try:
        reference = train("reference", replace(candidate, backend_class=peer, options={}), noise=2)
    except (BackendUnavailable, InputError) as error:
        checked.skipped[f"{candidate.name}, verdict"] = f"there is no reference: {error}"
        return
    judged = judge_run(train("it", candidate), reference)
    if judged.word is Word.NOT_SEEN:  # no check failed
        checked.skipped[f"{candidate.name}, verdict"] = f"{judged}: {judged.because}"
    elif not judged.word.is_fine:
        yield f"compared with {peer.__name__} the verdict is {judged}: {judged.because}"


REQUIREMENTS: tuple[Requirement, ...] = (
    _leaves_the_model_alone, _loss, _parameters, _gradients, _loss_scale, _answers, goes_on_from_a_state,
    finished, two_at_once,
)  # fmt: skip


# ---- helpers of several requirements


def _named(what: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: Any) -> Iterator[str]:
    """Compares the names, shapes and dtype of ``tensors`` with the ones of ``expected``."""
    if missing := [name for name in expected if name not in tensors]:
        yield f"{what} lack {', '.join(missing)}"
    if unknown := [name for name in tensors if name not in expected]:
        yield f"{what} have {', '.join(unknown)}, which the model has not"
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name].shape:
            yield f"{what}: {name} is {list(tensor.shape)}, expected {list(expected[name].shape)}"
    if wrong := {_dtype(tensor) for tensor in tensors.values() if dtype is not None and tensor.dtype is not dtype}:
        yield f"{what} are {', '.join(sorted(wrong))}, expected {str(dtype).removeprefix('torch.')}"


def _infinite(x: Tensor) -> Tensor:
    return torch.full_like(x, math.inf) if x.is_floating_point() else x


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _stored(tensors: Mapping[str, Tensor], backend: Any) -> Params:
    """Returns the tensors as a backend keeps them: rounded, if it promises weights of another format."""
    dtype = torch_dtype(FORMATS[promises_of(backend).weights])
    return {name: t.to(dtype).to(t.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
