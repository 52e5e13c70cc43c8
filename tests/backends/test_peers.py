"""Backends that people choose instead of plain amp and fp32: one CUDA graph, torch.compile, TF32."""

import io
import json
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pandas as pd
import pytest
import torch
from support.backends import BACKENDS, finish_step, make_backend, step_to_gradients, take_step
from support.command import SMALL
from support.judging import dataset_of, examined
from support.marks import CUDA, slow_after
from support.tasks import make_batch, make_task
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from mpcompare import contract
from mpcompare.backends import amp_compile
from mpcompare.backends.amp import Amp
from mpcompare.backends.fused import Fused
from mpcompare.backends.peers.bf16_states import Bf16States
from mpcompare.backends.peers.bf16_weights import Bf16Weights
from mpcompare.backends.torch_model import gradient_dtype, load_optimizer_state
from mpcompare.contract import BackendUnavailable
from mpcompare.cost import allocated_bytes
from mpcompare.instruments import fp32_products, meter
from mpcompare.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mpcompare.native.graph import WARMUP
from mpcompare.precision import PRECISIONS
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.batch import Tree, take_trees
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.verdict.examine.oracle import exact_step

CPU = torch.device("cpu")


class EagerGraph(Amp):
    """The step that amp_graph captures, without a graph: amp with fused SGD."""

    def __init__(self, model, task, precision, loss_scale):
        super().__init__(model, task, precision, loss_scale)
        self.optimizer = task.optimizer.make(self.model.parameters(), fused=True)


def stream(task, device, steps, infinite=()):
    """Yields batches; batches with a number in ``infinite`` have an infinite input."""
    for number in range(steps):
        x, y = make_batch(task, device, number)
        if number in infinite:
            x[0, 0] = math.inf
        yield x, y


def bits(tensors):
    return fingerprint({name: t.contiguous() for name, t in tensors.items()})


def trajectory(backend, batches):
    """Yields scale, loss, gradients, skip and weights of each step as bits, so that NaN is equal to itself."""
    for x, y in batches:
        scale = float(backend.loss_scale())
        loss, grads = step_to_gradients(backend, x, y)
        finish_step(backend)
        yield scale, bits({"loss": loss}), bits(grads), bool(backend.skipped), bits(backend.master_params())


@pytest.fixture
def empty_is_nan(monkeypatch):
    """Fills the memory that torch does not initialize with NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# ---- amp_graph

GRAPHS = [
    pytest.param(EagerGraph, BACKENDS["amp_graph"], id="amp_graph"),
    pytest.param(partial(Fused, graph=False), partial(Fused, graph=True), id="fused"),
]


@pytest.mark.parametrize(
    "policy",
    [NoLossScale(), StaticLossScale(512.0), DynamicLossScale(2.0**10, growth_interval=3)],
    ids=lambda policy: policy.name,
)
@pytest.mark.parametrize("momentum", slow_after(1, [0.9, 0.0]))
@pytest.mark.parametrize("loss", slow_after(1, ["cross_entropy", "mse"]))
@pytest.mark.parametrize(("eager", "graphed"), GRAPHS)
def test_the_graph_is_the_eager_step_bit_for_bit(device, eager, graphed, loss, momentum, policy):
    task = make_task(loss=loss, momentum=momentum)
    model = task.new_model(0, device)
    scaled = not isinstance(policy, NoLossScale)
    # One overflow in the warm-up and two in the graph. After one of these the steps are good until the scale grows.
    infinite = (1, 6, 13) if scaled else ()
    seen = [
        list(trajectory(backend(model, task, "fp16", policy_of(policy)), stream(task, device, 16, infinite)))
        for backend in (eager, graphed)
    ]
    assert seen[0] == seen[1]
    assert [number for number, step in enumerate(seen[1]) if step[3]] == list(infinite)
    assert len({step[4] for step in seen[1]}) == 16 - len(infinite)  # every other step moves the weights
    if isinstance(policy, DynamicLossScale):
        scales = [step[0] / 2.0**10 for step in seen[1]]
        assert scales == [1, 1, 0.5, 0.5, 0.5, 1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 1, 1]


def policy_of(policy):
    """Returns a fresh loss scale of the same policy."""
    return type(policy)(**{k: getattr(policy, k) for k in ("init_scale", "growth_interval") if hasattr(policy, k)})


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 4), (4, 0)])
def test_a_graph_continues_from_a_state_whether_it_is_captured_or_not(device, before, after):
    """The state is saved after ``before`` steps and loaded after ``after`` steps; the first 2 steps are warm-up."""
    task = make_task(momentum=0.9)

    def new(seed):
        policy = DynamicLossScale(2.0**10, growth_interval=3)
        return make_backend("amp_graph", task, "fp16", device, policy, seed=seed)

    whole, resumed = new(0), new(1)
    list(trajectory(whole, stream(task, device, before)))
    list(trajectory(resumed, stream(task, device, after, infinite=(2,))))
    state = torch.load(saved(whole), weights_only=True)
    resumed.load_state_dict(state)
    rest = list(stream(task, device, 6, infinite=(1,)))
    assert list(trajectory(whole, rest)) == list(trajectory(resumed, rest))


def saved(backend):
    """Returns the backend's state, written to a file and read again."""
    file = io.BytesIO()
    torch.save(backend.state_dict(), file)
    file.seek(0)
    return file


class Sums(torch.nn.Module):
    """Takes two inputs."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, a, b):
        return self.layer(a + b)


def several_inputs():
    """Returns the task and the network of two inputs, and a batch of any number of rows."""
    task = Task(Sums, "cross_entropy", Sgd(0.1), 8)
    take_trees(model := task.new_model(0, CPU), inputs=True, outputs=False)
    return task, model, lambda rows: (Tree((torch.rand(rows, 4), torch.rand(rows, 4))), torch.arange(rows) % 3)


def test_a_graph_takes_several_inputs_and_batches_of_another_shape(recorded_graphs):
    task, model, batch = several_inputs()
    backends = [made(model, task, "bf16", NoLossScale()) for made in (EagerGraph, BACKENDS["amp_graph"])]
    for rows in (8,) * (WARMUP + 2) + (6,) * (WARMUP + 2):
        x, y = batch(rows)
        assert contract.take_step(backends[0], [(x, y)], 0.1) == contract.take_step(backends[1], [(x, y)], 0.1)
    assert backends[1].graph.replay is not None


def test_weights_in_bf16_take_several_inputs():
    task, model, batch = several_inputs()
    backend = Bf16Weights(model, task, "bf16", NoLossScale())
    assert contract.take_step(backend, [batch(8)], 0.1) > 0
    assert backend.observed["activations"] is torch.bfloat16


def test_momentum_of_a_fused_optimizer_is_0_after_a_state_without():
    parameters = dict(torch.nn.Linear(2, 3).named_parameters())
    optimizer = Sgd(0.1, momentum=0.9).make(parameters.values(), fused=True)
    for p in parameters.values():
        optimizer.state[p]["momentum_buffer"].fill_(5.0)
    load_optimizer_state(optimizer, parameters, {})
    assert [optimizer.state[p]["momentum_buffer"].abs().max() for p in parameters.values()] == [0, 0]


def test_a_network_without_gradients_has_those_of_fp32():
    assert gradient_dtype(torch.nn.Linear(2, 3)) is torch.float32


def test_a_kind_of_amp_names_itself_where_there_is_no_kernel():
    task = replace(make_task(), model=partial(torch.nn.LSTM, 4, 3))
    with pytest.raises(BackendUnavailable, match=r"^backend=bf16_states precision=fp16: torch's CPU LSTM has no fp16"):
        Bf16States(task.new_model(0, CPU), task, "fp16", NoLossScale())


def test_a_skipped_first_step_leaves_no_momentum(device, empty_is_nan):
    """torch's fused SGD makes its buffers in the first step, and does not initialize them if that step is skipped."""
    task = make_task(momentum=0.9)
    backend = make_backend("amp_graph", task, "fp16", device, DynamicLossScale(1024.0))
    x, y = make_batch(task, device)
    take_step(backend, torch.full_like(x, math.inf), y)
    assert backend.skipped
    before = {k: p.clone() for k, p in backend.master_params().items()}
    _, grads = step_to_gradients(backend, x, y)
    assert list(grads) == list(before)
    for k, p in backend.master_params().items():
        torch.testing.assert_close(p, before[k] - task.optimizer.lr * grads[k], rtol=2.0**-22, atol=2.0**-24)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_verdict_on_a_graph_is_same(device, precision):
    task = make_task(in_features=40, hidden=[64], samples=32 * 30, momentum=0.9)
    dataset = dataset_of(task)
    amp, graph = (
        examined(name, BACKENDS[name], task, dataset, precision, noise=2 * (name == "amp"), device=device.type)
        for name in ("amp", "amp_graph")
    )
    verdict = judge_run(graph, amp)
    assert (verdict.word, verdict.unchecked) == ("same", []), verdict.because


def test_the_memory_of_a_graph_is_amps_and_a_batch_of_its_own(recorded_graphs):
    """The warm-up's memory is measured, because a graph that is recorded on a CPU keeps every tensor it makes."""
    task = make_task(in_features=512, hidden=[640, 512], batch_size=512, momentum=0.9)
    x, y = make_batch(task, CPU)
    measured, models = [], []
    for name in ("amp", "amp_graph"):
        initial, made = task.new_model(0, CPU), []

        def warm_up(name=name, initial=initial, made=made):
            made.append(BACKENDS[name](initial, task, "bf16", NoLossScale()))
            for _ in range(WARMUP):
                take_step(made[0], x, y)

        measured.append(meter.peak_memory(CPU, warm_up).bytes)
        models.append(allocated_bytes(made[0].memory_model()))
    assert models[1] - models[0] == x.nbytes + y.nbytes
    assert measured[1] - measured[0] == pytest.approx(x.nbytes + y.nbytes, rel=0.01, abs=64 * task.batch_size)


# ---- tf32


@pytest.mark.parametrize("device", [CUDA])
def test_tf32_rounds_what_fp32_does_not(device):
    """Operands have 10 bits after the point and sums are fp32, so errors are like fp16's, 2^-11, not like fp32's. The
    last layer is asked: in front of a relu an input near 0 may change its sign, which is no rounding."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 before sm_80")
    task = make_task(in_features=256, hidden=[256], batch_size=256)
    x, y = make_batch(task, torch.device(device))
    errors = {}
    for name in ("fp32", "tf32"):
        with fp32_products.tf32(name == "tf32"):
            backend = make_backend(name, task, name, torch.device(device))
            exact = exact_step(backend.model, task.loss_fn, [(x, y)], PRECISIONS["fp32"]).grads["layer2.weight"]
            _, grads = step_to_gradients(backend, x, y)
            errors[name] = ((grads["layer2.weight"] - exact).norm() / exact.norm()).item()
    assert errors["fp32"] < 2.0**-18 < errors["tf32"] < 2.0**-8


@pytest.mark.slow
def test_what_needs_a_gpu_is_a_row_that_says_so_and_the_others_finish(cli, tmp_path):
    folder = tmp_path / "sweep"
    ended = cli("-m", "backend=amp,amp_graph,tf32", *SMALL, "hydra/launcher=basic", "device=cpu",
                f"hydra.sweep.dir={folder}")  # fmt: skip
    assert ended.code == 1
    table = pd.read_csv(folder / "report" / "summary.csv")
    assert table["status"].tolist() == ["ok", "failed", "failed"]
    assert table["error"].tolist()[1:] == [
        "backend=amp_graph needs a CUDA GPU: its step is a CUDA graph, this run is on cpu",
        "backend=tf32 needs a CUDA GPU, this run is on cpu",
    ]
    for error in table["error"][1:]:
        assert error in ended.out
    assert "Traceback" not in ended.out + ended.err


# ---- amp_compile: on a CPU few tests of one shape, because each shape and precision takes seconds to compile


TINY = {"hidden": [24], "momentum": 0.9}


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), CUDA], scope="module")
def compiled(request):
    """Returns a device, and the task that has been compiled there in fp16."""
    device, task = torch.device(request.param), make_task(**TINY)
    take_step(make_backend("amp_compile", task, "fp16", device), *make_batch(task, device))
    return device, task


def test_fresh_instances_compile_nothing(compiled):
    """The harness makes an instance for each block, from other weights and with another loss scale. The first may
    compile: another test may have set a flag of torch since, such as the flag of TF32, for which a graph holds."""
    device, task = compiled
    graphs = []
    for seed in range(20):
        policy = DynamicLossScale(2.0**seed) if seed % 2 else NoLossScale()
        backend = make_backend("amp_compile", task, "fp16", device, policy, seed=seed)
        for x, y in stream(task, device, 3):
            take_step(backend, x, y)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 20
    assert graphs[0] > 0


def test_one_shape_too_many_is_an_error_and_not_an_eager_step(compiled):
    device, _ = compiled
    other = make_task(**{**TINY, "batch_size": 16})
    backend = make_backend("amp_compile", other, "fp16", device)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        backend.forward(*make_batch(other, device))


def test_compiled_gradients_are_as_good_as_amps(compiled):
    device, task = compiled
    x, y = make_batch(task, device)
    errors = {}
    for name in ("amp", "amp_compile"):
        backend = make_backend(name, task, "fp16", device, StaticLossScale(1024.0))
        exact = exact_step(backend.model, task.loss_fn, [(x, y)], PRECISIONS["fp32"]).grads
        loss, grads = step_to_gradients(backend, x, y)
        assert (loss.dtype, loss.shape) == (torch.float32, ())
        errors[name] = {k: ((g.double() - exact[k]).norm() / exact[k].norm()).item() for k, g in grads.items()}
    assert list(errors["amp_compile"]) == list(exact)
    for k, error in errors["amp_compile"].items():
        assert error <= 2 * errors["amp"][k] + 2 * 2.0**-11, k


def test_scale_and_skips_of_a_compiled_step_are_amps(compiled):
    device, task = compiled
    seen = []
    for name in ("amp", "amp_compile"):
        backend = make_backend(name, task, "fp16", device, DynamicLossScale(2.0**10, growth_interval=3))
        steps = list(trajectory(backend, stream(task, device, 12, infinite=(0, 6))))
        seen.append([(scale, skipped) for scale, _, _, skipped, _ in steps])
        same_weights = [before[4] == after[4] for before, after in pairwise(steps)]
        assert [number for number, same in enumerate(same_weights, start=1) if same] == [6]
        assert backend.dtypes() == {
            "params": "fp32", "activations": "fp16", "loss": "fp32", "gradients": "fp32", "optimizer": "fp32",
        }  # fmt: skip
    assert seen[0] == seen[1]
    assert [number for number, (_, skipped) in enumerate(seen[1]) if skipped] == [0, 6]


def test_a_compiled_step_continues_from_a_state_bit_for_bit(compiled):
    device, task = compiled

    def new(seed):
        return make_backend(
            "amp_compile", task, "fp16", device, DynamicLossScale(2.0**10, growth_interval=3), seed=seed
        )

    whole, resumed = new(0), new(1)
    for backend in (whole, resumed):
        list(trajectory(backend, stream(task, device, 4)))
    resumed.load_state_dict(torch.load(saved(whole), weights_only=True))
    rest = list(stream(task, device, 4, infinite=(1,)))
    assert list(trajectory(whole, rest)) == list(trajectory(resumed, rest))


def test_the_verdict_on_a_compiled_step_is_same(compiled):
    device, task = compiled
    dataset = dataset_of(task)
    amp, compiled_amp = (
        examined(name, BACKENDS[name], task, dataset, "fp16", noise=2 * (name == "amp"), device=device.type)
        for name in ("amp", "amp_compile")
    )
    verdict = judge_run(compiled_amp, amp)
    assert (verdict.word, verdict.unchecked) == ("same", []), verdict.because


@pytest.mark.slow
def test_a_compiled_run_says_nothing_of_how_it_was_compiled(cli, tmp_path):
    folder = tmp_path / "run"
    graphs = counters["stats"]["unique_graphs"]
    ended = cli(*SMALL, "backend=amp_compile", "device=cpu", f"hydra.run.dir={folder}")
    assert (ended.code, ended.err) == (0, "")
    assert len(ended.out.splitlines()) == 1
    # Training, blocks, phases, memory and examination take one program. A second one shows the dtypes.
    assert counters["stats"]["unique_graphs"] == graphs + 2
    result = json.loads((folder / "result.json").read_text())
    assert (result["precision"], result["dtypes"]["activations"]) == ("bf16", "bf16")
    assert result["memory_model"] == {}
    assert result["peak_memory_bytes_analytic"] is None


def test_nothing_to_compile_with_is_said_at_construction(monkeypatch):
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")}),
        pytest.raises(BackendUnavailable, match="backend=amp_compile needs a C\\+\\+ compiler"),
    ):
        make_backend("amp_compile", make_task(), "bf16", CPU)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(BackendUnavailable, match="backend=amp_compile needs Triton"):
        amp_compile.require_compiler("cuda")
