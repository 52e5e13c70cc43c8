"""check_backend lets right backends pass, and names each violation in one line."""

import copy
import random
import threading

import pytest
import torch
from support.backends import BACKENDS
from support.marks import slow_rows
from torch import nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.contract import BackendUnavailable
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale
from mpcompare.tasks.batch import tensors_of
from mpcompare.tasks.data.given import dataset_of
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.testing import BrokenContract, Checked, check_backend, continuing, requirements, small_tasks

TASKS = small_tasks()
MLP = {"mlp": TASKS["mlp"]}
RECIPE = {"recipe": TASKS["recipe"]}
CNN = {"cnn": TASKS["cnn"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("amp", "bf16"),
        pytest.param("master_weights", "bf16", marks=pytest.mark.slow),
        pytest.param("fp32", "fp32", marks=pytest.mark.slow),
    ],
)
def test_backends_of_any_network_keep_the_contract(name, precision):
    checked = check_backend(BACKENDS[name], precision=precision)
    assert checked.candidates == [f"{task} {precision}" for task in ("mlp", "recipe", "cnn", "transformer")]
    assert list(checked.skipped) == [f"transformer {precision}, overflow"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amp", "master_weights"])
def test_they_keep_it_in_all_their_precisions(name):
    assert len(check_backend(BACKENDS[name]).candidates) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "scratch"])
def test_backends_of_mlps_keep_the_contract_and_the_other_tasks_are_skipped(name):
    checked = check_backend(BACKENDS[name])
    assert checked.candidates == [f"{task} {p}" for task in ("mlp", "recipe") for p in ("fp16", "bf16", "fp32")]
    assert "trains MLPs" in checked.skipped["cnn bf16"]
    assert checked.skipped["mlp tf32"] == "tf32 needs a CUDA GPU"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "amp_compile"])
def test_the_backends_of_this_project_keep_the_contract_on_cuda(name):
    assert check_backend(BACKENDS[name], device="cuda").candidates


@pytest.mark.slow
def test_a_step_in_one_piece_keeps_the_contract(recorded_graphs):
    checked = check_backend(BACKENDS["amp_graph"], precision="bf16", tasks=MLP)
    assert checked.candidates == ["mlp bf16"]
    assert check_backend(BACKENDS["fused"], precision="bf16", tasks=MLP, graph=True).candidates == ["mlp bf16"]


class WritesIntoTheModel(Fp32):
    def __init__(self, model, task, precision, loss_scale):
        super().__init__(model, task, precision, loss_scale)
        self.model = model
        self.optimizer = task.optimizer.make(model.parameters())


class StartsElsewhere(Fp32):
    def __init__(self, model, task, precision, loss_scale):
        super().__init__(model, task, precision, loss_scale)
        with torch.no_grad():
            next(self.model.parameters()).mul_(1 + 2**-20)


class HalfThePhases(Fp32):
    unscale = None
    update = None


class OwnNameOfItsTask(Fp32):
    def __init__(self, model, task, precision, loss_scale):
        super().__init__(model, task, precision, loss_scale)
        self._task = vars(self).pop("task")


class NoStep(Fp32):
    forward = backward = unscale = clip = step = update = None


class LossIn16Bits(Amp):
    def forward(self, x, y):
        return super().forward(x, y).bfloat16()


class LossScaled(Amp):
    def forward(self, x, y):
        return super().forward(x, y) * self.loss_scale()


class GradsScaled(Amp):
    def grads(self):
        return {name: 256 * g for name, g in super().grads().items()}


class GradsIn16Bits(Amp):
    def grads(self):
        return {name: g.bfloat16() for name, g in super().grads().items()}


class OwnNames(Fp32):
    def master_params(self):
        return {f"module.{name}": p for name, p in super().master_params().items()}


class ForgetsMomentum(Fp32):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "optimizer": {}})


class ForgetsBuffers(MasterWeights):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "buffers": copy.deepcopy(self.buffers())})


class ForgetsGrowth(Amp):
    def state_dict(self):
        state = super().state_dict()
        return {**state, "loss_scale": {**state["loss_scale"], "growth_tracker": 0}}


class NeverSkips(MasterWeights):
    def unscale(self):
        super().unscale()
        self.found_inf = False


class SaysItSkippedNothing(Amp):
    def update(self):
        super().update()
        self.skipped = False


class GrowsLate(MasterWeights):
    def __init__(self, model, task, precision, loss_scale):
        super().__init__(model, task, precision, loss_scale)
        if isinstance(loss_scale, DynamicLossScale):
            self.scaling.growth_interval += 1


class ScalesTheBatch(Fp32):
    def forward(self, x, y):
        tensors_of(x)[0].mul_(2)
        return super().forward(x, y)


class DrawsNumbers(Fp32):
    def forward(self, x, y):
        random.random()
        return super().forward(x, y)


class KeepsTheState(Fp32):
    """``fp32`` whose momentum is the tensor of the state that it loaded."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for name, p in self.model.named_parameters():
            if name in state["optimizer"].get("momentum_buffer", {}):
                self.optimizer.state[p]["momentum_buffer"] = state["optimizer"]["momentum_buffer"][name]


class GoesOnInAThread(Fp32):
    """``fp32`` whose update is done by a thread, for which nobody waits."""

    def step(self, lr):
        self.thread = threading.Timer(0.01, super().step, [lr])
        self.thread.start()

    def update(self):
        pass

    def forward(self, x, y):
        if hasattr(self, "thread"):
            self.thread.join()
            super().update()
        return super().forward(x, y)


class GradsDropped(Fp32):
    """A step in one piece that sets its gradients to 0 at its end."""

    def train_step(self, batches, lr):
        ((x, y),) = batches
        loss = Fp32.forward(self, x, y)
        Fp32.backward(self)
        Fp32.step(self, lr)
        self.optimizer.zero_grad(set_to_none=False)
        return loss


class FourDtypes(Fp32):
    def dtypes(self):
        return {name: dtype for name, dtype in super().dtypes().items() if name != "optimizer"}


class OwnKinds(Fp32):
    def memory_model(self):
        return {"weights": {"W1": 4}}


class Shared(Fp32):
    """``fp32`` that returns the loss of the instance that was made last."""

    latest = None

    def __init__(self, model, task, precision, loss_scale):
        super().__init__(model, task, precision, loss_scale)
        Shared.latest = self

    def forward(self, x, y):
        super().forward(x, y)
        return self.task.loss_fn(Shared.latest.model(x), y).detach()


class OptionWithoutDefault(Fp32):
    def __init__(self, model, task, precision, loss_scale, speed):
        super().__init__(model, task, precision, loss_scale)


class AnyOption(Fp32):
    def __init__(self, model, task, precision, loss_scale, **options):
        super().__init__(model, task, precision, loss_scale)


class Raises(Fp32):
    def dtypes(self):
        raise ZeroDivisionError("a bug")


class CannotBeMade(Fp32):
    def __init__(self, model, task, precision, loss_scale):
        raise ZeroDivisionError("a bug")


class RefusesEveryScale(Amp):
    def __init__(self, model, task, precision, loss_scale):
        raise InputError("loss_scale", loss_scale.name, "nothing is accepted")


class Unavailable(Fp32):
    def __init__(self, model, task, precision, loss_scale):
        raise BackendUnavailable("backend=mine needs a unicorn")


class OnePercentMore(Fp32):
    """``fp32`` whose gradients alone are wrong."""

    def backward(self):
        super().backward()
        for p in self.model.parameters():
            p.grad *= 1.01


class NeverClips(Fp32):
    def clip(self):
        self.grad_norm = 0.0


class SumsMicroBatches(Fp32):
    """``fp32`` that divides no micro-batch by their number."""

    def backward(self):
        self.loss = self.loss * self.task.accumulate
        super().backward()


class NoMasterWeights(Amp):
    """``amp`` that says fp32 and keeps weights that have the digits of bf16."""

    def step(self, lr):
        super().step(lr)
        if not self.skipped:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.copy_(p.bfloat16())


def one_precision(backend):
    """Returns bf16 where the backend has it; None, for all precisions, where the question is about fp16."""
    has_it = "bf16" in getattr(backend, "PRECISIONS", ()) and backend not in (RefusesEveryScale, ForgetsGrowth)
    return "bf16" if has_it else None


QUICK = [
    (WritesIntoTheModel, MLP, "it writes to the parameters of the model that it was given: expected a copy"),
    (OwnNameOfItsTask, MLP, "task is None, expected the task that it was made with"),
    (HalfThePhases, MLP, "it offers forward, backward, clip, step and not unscale, update: expected all phases"),
    (NoStep, MLP, "it offers no step: expected forward, backward, unscale, clip, step, update, or train_step"),
    (LossScaled, MLP, "the loss is 256 times the exact one at loss scale 256: expected it unscaled"),
    (ForgetsMomentum, MLP, "a backend that loads a state (by copy.deepcopy) continues with another layer1.weight"),
    (NeverSkips, MLP, "loss_scale=static: a step with infinite gradients changes parameters"),
    (OptionWithoutDefault, MLP, "option speed has no default"),
    (AnyOption, MLP, "the constructor takes **options, expected each option by name"),
    (CannotBeMade, MLP, "the constructor raises ZeroDivisionError: a bug (mlp fp32)"),
    (
        RefusesEveryScale,
        MLP,
        "the constructor raises InputError: loss_scale=dynamic: nothing is accepted (mlp fp16",
    ),
    (Unavailable, MLP, "nothing could be checked: backend=mine needs a unicorn"),
    (OnePercentMore, MLP, "compared with Fp32 the verdict is differs: "),
    (lambda: None, MLP, "it is no class"),
]
SLOW = [
    (WritesIntoTheModel, CNN, "it writes to the buffers of the model that it was given: expected a copy"),
    (StartsElsewhere, MLP, "its first parameters are not the model's parameters, bit for bit"),
    (LossIn16Bits, MLP, "the loss is a tensor [] bfloat16 on cpu, expected [] fp32 on cpu"),
    (GradsScaled, MLP, "times the exact ones at loss scale 256: expected them unscaled"),
    (GradsIn16Bits, MLP, "grads() are bfloat16, expected float32"),
    (OwnNames, MLP, "master_params() lack layer1.weight, layer1.bias, layer2.weight"),
    (OwnNames, MLP, "master_params() have module.layer1.weight"),
    (ForgetsBuffers, CNN, "continues with another 1.running_mean in step 1"),
    (ForgetsGrowth, MLP, "continues with another loss scale in step 1"),
    (NeverSkips, MLP, "loss_scale=dynamic: skipped is False after a step with infinite gradients"),
    (SaysItSkippedNothing, MLP, "loss_scale=dynamic: skipped is False after a step with infinite gradients"),
    (GrowsLate, MLP, "loss_scale=dynamic: loss_scale() is 256 where the policy says 512"),
    (ScalesTheBatch, MLP, "it writes to the inputs of a batch: expected a copy"),
    (KeepsTheState, MLP, "load_state_dict() keeps a tensor of the state: expected copies"),
    (GoesOnInAThread, MLP, "weights change after the step has returned: expected it to be finished"),
    (GradsDropped, MLP, "grads() are 0 after train_step(): expected the step's gradients"),
    (FourDtypes, MLP, "expected a name for each of params, activations, gradients, loss, optimizer"),
    (OwnKinds, MLP, "memory_model() has the kinds weights, expected some of inputs, master params"),
    (Shared, MLP, "with another backend in the same process it computes another loss in step 1"),
    (Raises, MLP, "raises ZeroDivisionError: a bug (mlp fp32)"),
    (NoMasterWeights, MLP, "compared with Amp the verdict is differs: no master weights: "),
    (NeverClips, RECIPE, "compared with Fp32 the verdict is differs: clip: "),
    (SumsMicroBatches, RECIPE, "differs: accumulation: every micro-batch counts 2 times: the loss is not divided"),
]


@pytest.mark.parametrize(("backend", "tasks", "sentence"), [*QUICK, *slow_rows(SLOW)])
def test_a_broken_requirement_is_a_line(backend, tasks, sentence, monkeypatch):
    if backend is not GoesOnInAThread:
        monkeypatch.setattr(continuing, "SOON_S", 0.01)
    with pytest.raises(BrokenContract) as caught:
        check_backend(backend, tasks=tasks, precision=one_precision(backend))
    assert [line for line in caught.value.requirements if sentence in line], caught.value
    assert all("\n" not in line for line in caught.value.requirements)


def test_all_broken_requirements_are_listed_each_once():
    class Several(FourDtypes, OwnKinds):
        pass

    with pytest.raises(AssertionError, match="Several breaks 2 requirements of the contract:") as caught:
        check_backend(Several, tasks={**MLP, "again": TASKS["mlp"]})
    assert [line.rpartition(" (")[2] for line in caught.value.requirements] == ["mlp fp32, again fp32)"] * 2


@pytest.mark.slow
def test_an_option_is_handed_to_the_constructor_and_a_wrong_one_is_named():
    assert check_backend(BACKENDS["scratch"], precision="bf16", tasks=MLP, engine="torch").candidates == ["mlp bf16"]
    with pytest.raises(BrokenContract, match="verdict is differs"):
        check_backend(BACKENDS["scratch"], precision="fp16", tasks=MLP, softmax="fp16")
    with pytest.raises(BrokenContract, match="option sped was given, and the constructor does not take it"):
        check_backend(BACKENDS["scratch"], tasks=MLP, sped=1)


class DefaultInterval(Amp):
    """``amp`` with dynamic loss scales that grow as GradScaler's does by default, and no other."""

    def __init__(self, model, task, precision, loss_scale):
        if getattr(loss_scale, "growth_interval", None) != 2000:
            raise InputError("loss_scale", loss_scale.name, "expected growth_interval=2000")
        super().__init__(model, task, precision, loss_scale)


class DefaultIntervalScaled(DefaultInterval):
    def forward(self, x, y):
        return super().forward(x, y) * self.loss_scale()


def test_a_backend_of_one_interval_is_checked_with_it(monkeypatch):
    monkeypatch.setattr(requirements, "verdict", lambda candidate, checked: [])  # the examination asks for another
    only = (requirements._loss, requirements._loss_scale, continuing.goes_on_from_a_state)
    monkeypatch.setattr(requirements, "REQUIREMENTS", only)
    said = {"mlp fp16, growth of the loss scale": "it accepts none that changes within 6 finite steps"}
    assert check_backend(DefaultInterval, precision="fp16", tasks=MLP).skipped == said
    with pytest.raises(BrokenContract) as caught:
        check_backend(DefaultIntervalScaled, precision="fp16", tasks=MLP)
    said = "the loss is 6.55e+04 times the exact one at loss scale 65536: expected it unscaled (mlp fp16)"
    assert caught.value.requirements == [said]


@pytest.mark.slow
def test_a_precision_that_it_does_not_have_is_an_input_error():
    with pytest.raises(InputError, match="precision=fp16: backend=Fp32 accepts one of auto, fp32"):
        check_backend(Fp32, precision="fp16")
    assert check_backend(Fp32, precision="auto", tasks=MLP).candidates == ["mlp fp32"]


class OfNests(nn.Module):
    """Takes its inputs by name, and returns its loss with its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, ids, labels):
        output = self.linear(x) + ids[:, None]
        return {"output": output, "loss": nn.functional.cross_entropy(output, labels)}


def test_a_task_of_nests_is_checked_as_others_are(monkeypatch):
    monkeypatch.setattr(requirements, "verdict", lambda candidate, checked: [])
    only = (requirements._leaves_the_model_alone, requirements._loss, requirements._loss_scale)
    monkeypatch.setattr(requirements, "REQUIREMENTS", only)
    x, ids = torch.randn(16 * 10, 4), torch.arange(16 * 10) % 3
    nest = {"x": x, "ids": ids, "labels": ids}
    task = Task(OfNests, "model", Sgd(0.1), batch_size=16)
    tasks = {"nests": (task, dataset_of((nest, nest, nest, nest), "nests"))}
    assert check_backend(Amp, tasks=tasks, precision="bf16") == Checked(["nests bf16"])
    with pytest.raises(BrokenContract, match="it writes to the inputs of a batch: expected a copy .nests fp32."):
        check_backend(ScalesTheBatch, tasks=tasks, precision="fp32")


def test_the_generators_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(requirements, "verdict", lambda candidate, checked: [])
    monkeypatch.setattr(requirements, "REQUIREMENTS", (requirements._loss,))
    before = torch.get_rng_state(), random.getstate()
    assert check_backend(DrawsNumbers, tasks=MLP).candidates == ["mlp fp32"]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
