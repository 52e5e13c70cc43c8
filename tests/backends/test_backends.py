import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.backends import (
    BACKENDS,
    each_backend,
    each_backend_once,
    finish_step,
    make_backend,
    step_to_gradients,
    take_step,
)
from support.tasks import make_batch, make_task, mlp_of

from mpcompare.backends import scratch
from mpcompare.contract import BackendUnavailable
from mpcompare.errors import InputError
from mpcompare.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mpcompare.native import ops
from mpcompare.native.build import BuildError
from mpcompare.precision import PRECISIONS, resolve_precision
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.task import params_of
from mpcompare.verdict.examine.oracle import exact_step

CPU = torch.device("cpu")
PEER = {"fp32": "fp32", "fp16": "amp", "bf16": "amp"}  # torch's own implementation in the same precision


class Capped(DynamicLossScale):
    """A policy that nobody else has: it grows no further."""

    name = "capped"

    def update(self, found_inf):
        super().update(found_inf)
        self.scale = min(self.scale, 512.0)


def loss_and_grads(name, task, precision, device, x, y, engine="native", seed=0):
    scale = StaticLossScale(1024.0) if precision == "fp16" else NoLossScale()
    backend = make_backend(name, task, precision, device, scale, engine, seed)
    loss, grads = step_to_gradients(backend, x, y)
    return loss.item(), {name: g.double() for name, g in grads.items()}


def sum_of_magnitudes(model, loss_fn, x, y):
    """Returns ``sum_i |gradient of sample i| / n`` by tensor; rounding errors are relative to it."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params_of(model).items()}
    for i in range(len(x)):
        for name, g in exact_step(model, loss_fn, [(x[i : i + 1], y[i : i + 1])], PRECISIONS["fp32"]).grads.items():
            total[name] += g.abs() / len(x)
    return total


MANUAL = ["scratch", "fused"]  # no autograd: gradients, scaling and skipping are this project's own
SCALED = ["amp", "amp_graph", "master_weights", *MANUAL]  # with a loss scale


def assert_as_good_as_peer(name, task, precision, device, engine, seed):
    """Asserts that the errors of loss and gradients, against float64, are at most twice the errors of torch's own
    implementation.

    The floor is for tensors on which the peer happens to be exact: one 16-bit rounding apart (2 u), and fp32 sums in
    another order (a unit roundoff of fp32 for every summand along the way, Higham section 3.1), both relative to the
    sum of the summands' magnitudes.
    """
    x, y = make_batch(task, device, seed)
    model = task.new_model(seed, device)
    exact = exact_step(model, task.loss_fn, [(x, y)], PRECISIONS["fp32"])  # nothing is rounded
    loss, grads = loss_and_grads(name, task, precision, device, x, y, engine, seed)
    peer_loss, peer_grads = loss_and_grads(PEER[precision], task, precision, device, x, y, seed=seed)

    u16 = 2 * PRECISIONS[precision].unit_roundoff if PRECISIONS[precision].is_16_bit else 0.0
    floor = u16 + (task.batch_size + sum(mlp_of(task).sizes)) * 2.0**-24
    assert abs(loss - exact.loss) <= 2 * abs(peer_loss - exact.loss) + floor * abs(exact.loss)
    magnitude = sum_of_magnitudes(model, task.loss_fn, x, y)
    assert list(grads) == list(exact.grads)
    for k, g in grads.items():
        error, peer_error = (g - exact.grads[k]).norm(), (peer_grads[k] - exact.grads[k]).norm()
        assert error <= 2 * peer_error + floor * magnitude[k].norm(), k


@pytest.mark.slow
@given(
    in_features=st.integers(1, 40), hidden=st.lists(st.integers(1, 40), max_size=4), out_features=st.integers(2, 12),
    batch_size=st.integers(1, 48), loss=st.sampled_from(["cross_entropy", "mse"]), seed=st.integers(0, 2**31),
    precision=st.sampled_from(["fp32", "fp16", "bf16"]),
    name_engine=st.sampled_from([("scratch", "native"), ("scratch", "torch"), ("fused", "native")]),
)  # fmt: skip
def test_manual_gradients_for_any_shape_and_depth(
    in_features, hidden, out_features, batch_size, loss, seed, precision, name_engine
):
    task = make_task(
        in_features=in_features, hidden=hidden, out_features=out_features, batch_size=batch_size, loss=loss
    )
    assert_as_good_as_peer(name_engine[0], task, precision, CPU, name_engine[1], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANUAL)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_manual_gradients(device, name, precision, loss):
    assert_as_good_as_peer(name, make_task(loss=loss, hidden=[64, 48]), precision, device, "native", seed=5)


@pytest.mark.parametrize("name", SCALED)
def test_loss_scaling_saves_gradients_that_fp16_would_lose(device, name):
    """The output is 0 and the targets are 2^-20, so the output's gradient is 2^-27: 0 in fp16, and exact times 2^16.

    x is rounded to fp16 (u), sums are fp32, and each gradient is rounded once (u): 2 u of the magnitudes.
    """
    task = make_task(hidden=[], out_features=4, loss="mse", batch_size=32)
    model = task.new_model(0, device)
    for p in params_of(model).values():
        p.zero_()
    x, _ = make_batch(task, device)
    y = torch.full((32, 4), 2.0**-20, device=device)
    _, grads = step_to_gradients(BACKENDS[name](model, task, "fp16", StaticLossScale(65536.0)), x, y)
    exact = exact_step(model, task.loss_fn, [(x, y)], PRECISIONS["fp32"]).grads
    magnitude = sum_of_magnitudes(model, task.loss_fn, x, y)
    assert list(grads) == list(exact)
    for k, g in grads.items():
        assert (g.double() - exact[k]).norm() <= 3 * 2.0**-11 * magnitude[k].norm()


def test_scratch_takes_softmax_and_loss_in_fp32_of_its_16_bit_logits(device):
    task = make_task(out_features=300)
    backend = make_backend("scratch", task, "bf16", device)
    seen = []
    loss_of = backend.loss_of
    backend.loss_of = lambda logits, y: seen.append(logits) or loss_of(logits, y)
    x, y = make_batch(task, device)
    loss = backend.forward(x, y)
    (logits,) = seen
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())
    exact = torch.nn.functional.cross_entropy(logits.double(), y).item()
    assert loss.item() == pytest.approx(exact, rel=300 * 2.0**-24)  # 300 summands in fp32


@pytest.mark.parametrize("size", [1.0, 200.0, 30000.0])
def test_softmax_of_any_logits_is_as_in_float64(device, size):
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 10, generator=random) * size).to(device)
    y = torch.randint(10, (64,), generator=random).to(device)
    loss, dlogits = scratch.cross_entropy(logits, y)
    logits64 = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(logits64, y)
    exact.backward()
    # log-probabilities are differences of numbers up to |logits|: their error is a few units of those, over the batch.
    error = 4 * 2.0**-24 * logits.abs().max().item() + 16 * 2.0**-24
    assert loss.item() == pytest.approx(exact.item(), abs=error)
    assert (dlogits - logits64.grad).abs().max().item() <= 2 * error / 64


@each_backend
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_is_sgd_on_fp32_masters(device, name, precision, momentum):
    task = make_task(momentum=momentum)
    x, y = make_batch(task, device)
    backend = make_backend(name, task, precision, device)
    velocity = {k: torch.zeros_like(p) for k, p in backend.master_params().items()}
    for _ in range(3):
        before = {k: p.clone() for k, p in backend.master_params().items()}
        _, grads = step_to_gradients(backend, x, y)
        finish_step(backend)
        assert not backend.skipped
        for k, p in backend.master_params().items():
            assert p.dtype == grads[k].dtype == torch.float32
            velocity[k] = momentum * velocity[k] + grads[k]
            # v and w each take two roundings here and there: a fused multiply-add may take one.
            torch.testing.assert_close(
                p, before[k] - task.optimizer.lr * velocity[k], rtol=4 * 2.0**-24, atol=4 * 2.0**-26
            )


@each_backend
def test_all_start_alike_and_leave_the_initial_weights_alone(device, name, precision):
    task = make_task()
    model = task.new_model(0, device)
    expected = fingerprint(params_of(model))
    backend = BACKENDS[name](model, task, precision, NoLossScale())
    assert fingerprint(backend.master_params()) == expected
    take_step(backend, *make_batch(task, device))
    assert fingerprint(backend.master_params()) != expected
    assert fingerprint(params_of(model)) == expected


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("policy", [StaticLossScale(2.0**60), DynamicLossScale(2.0**60)])
def test_overflow_leaves_parameters_and_optimizer_bit_identical(device, name, policy):
    task = make_task(momentum=0.9)
    x, y = make_batch(task, device)
    backend = make_backend(name, task, "fp16", device, type(policy)(policy.init_scale))
    before = {k: p.clone() for k, p in backend.master_params().items()}
    loss = take_step(backend, x, y)
    assert math.isfinite(loss)
    assert backend.skipped
    for k, p in backend.master_params().items():
        assert torch.equal(p.view(torch.int32), before[k].view(torch.int32))
    assert float(backend.loss_scale()) == policy.init_scale * (0.5 if isinstance(policy, DynamicLossScale) else 1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_scale_trajectory_and_skipped_steps_equal_amps(device, precision):
    task = make_task(hidden=[64], lr=0.5)
    backends = [make_backend(n, task, precision, device, DynamicLossScale(2.0**30, growth_interval=4)) for n in SCALED]
    trajectories = []
    for backend in backends:
        trajectory = []
        for seed in range(60):
            scale = float(backend.loss_scale())
            x, y = make_batch(task, device, seed)
            if seed % 17 == 5:
                x[0, 0] = math.inf  # overflows whatever the scale
            take_step(backend, x, y)
            trajectory.append((scale, bool(backend.skipped)))
        trajectories.append(trajectory)
    assert all(trajectory == trajectories[0] for trajectory in trajectories)
    skipped = sum(s for _, s in trajectories[0])
    assert 4 <= skipped < 40


@pytest.mark.parametrize("scale", [128.0, 128])  # GradScaler.update takes no whole number
@pytest.mark.parametrize("name", ["amp", "amp_graph"])
def test_static_scale_of_grad_scaler_never_moves(device, name, scale):
    task = make_task()
    backend = make_backend(name, task, "fp16", device, StaticLossScale(scale))
    for seed in range(5):
        x, y = make_batch(task, device, seed)
        x[0, 0] = math.inf if seed == 2 else x[0, 0]
        take_step(backend, x, y)
        assert backend.skipped == (seed == 2)
        assert float(backend.loss_scale()) == 128.0


@pytest.mark.parametrize("name", ["amp", "scratch", "fused", "master_weights"])
def test_a_fixed_scale_keeps_its_own_when_a_state_has_another(name):
    other, backend = (make_backend(name, make_task(), "fp16", CPU, StaticLossScale(scale)) for scale in (64.0, 128.0))
    backend.load_state_dict(other.state_dict())
    assert float(backend.loss_scale()) == 128.0


@each_backend
def test_without_loss_scaling_nothing_is_checked(device, name, precision):
    task = make_task()
    x, y = make_batch(task, device)
    x[0, 0] = math.nan
    backend = make_backend(name, task, precision, device)
    take_step(backend, x, y)
    assert not backend.skipped
    assert backend.master_params()["layer1.bias"].isnan().any()


@each_backend_once
def test_state_dict_continues_bit_for_bit(device, name, precision, tmp_path):
    task = make_task(momentum=0.9)
    scaled = name != "fp32"
    stream = [make_batch(task, device, seed) for seed in range(6)]

    def new():
        return make_backend(
            name, task, precision, device, DynamicLossScale(2.0**20, growth_interval=3) if scaled else None
        )

    whole = new()
    for x, y in stream[:3]:
        take_step(whole, x, y)
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    resumed = new()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    for x, y in stream[3:]:
        assert float(whole.loss_scale()) == float(resumed.loss_scale())
        assert take_step(whole, x, y).item() == take_step(resumed, x, y).item()
    assert fingerprint(whole.master_params()) == fingerprint(resumed.master_params())


@each_backend
def test_observed_dtypes_are_what_the_precision_promises(device, name, precision):
    task = make_task()
    backend = make_backend(name, task, precision, device)
    loss = take_step(backend, *make_batch(task, device))
    assert (loss.dtype, loss.shape, loss.device.type) == (torch.float32, (), device.type)
    gradients = "fp32" if name.startswith("amp") else precision  # autocast casts them back before anybody sees them
    assert backend.dtypes() == {
        "params": "fp32", "activations": precision, "loss": "fp32", "gradients": gradients, "optimizer": "fp32",
    }  # fmt: skip


def test_activations_stay_in_compute_dtype_inside_scratch(device):
    task = make_task()
    backend = make_backend("scratch", task, "bf16", device)
    backend.forward(*make_batch(task, device))
    assert {z.dtype for z in backend.z} == {p.dtype for p in backend.params.values()} == {torch.bfloat16}
    assert [tuple(z.shape) for z in backend.z] == [(32, width) for width in mlp_of(task).sizes[:-1]]


@each_backend_once
def test_training_learns_a_batch_by_heart(device, name, precision):
    task = make_task(lr=0.3, hidden=[64], momentum=0.9)
    backend = make_backend(name, task, precision, device, DynamicLossScale() if precision == "fp16" else None)
    x, y = make_batch(task, device)
    losses = [take_step(backend, x, y).item() for _ in range(60)]
    assert losses[0] > 1.4  # log 5 = 1.6, knowing nothing of 5 classes
    assert losses[-1] < 0.05


# ---- choosing


def test_auto_precision_is_fp16_on_cuda_and_bf16_on_a_cpu():
    assert resolve_precision("auto", BACKENDS["scratch"].PRECISIONS, "cuda", "scratch") == "fp16"
    assert resolve_precision("auto", BACKENDS["scratch"].PRECISIONS, "cpu", "scratch") == "bf16"
    assert resolve_precision("auto", BACKENDS["fp32"].PRECISIONS, "cuda", "fp32") == "fp32"
    assert resolve_precision("tf32", BACKENDS["scratch"].PRECISIONS, "cuda", "scratch") == "tf32"
    for device in ("cuda", "cpu"):  # on a CPU it is the constructor that says no, for a row of the table
        assert resolve_precision("auto", BACKENDS["tf32"].PRECISIONS, device, "tf32") == "tf32"


@pytest.mark.parametrize(
    ("precision", "name", "message"),
    [
        ("fp8", "scratch", "precision=fp8: expected one of auto, fp32, tf32, fp16, bf16"),
        ("fp16", "fp32", "precision=fp16: backend=fp32 accepts one of auto, fp32"),
        ("fp32", "amp", "precision=fp32: backend=amp accepts one of auto, fp16, bf16"),
        ("tf32", "fp32", "precision=tf32: backend=fp32 accepts one of auto, fp32"),
        ("tf32", "scratch", "precision=tf32: needs a CUDA device"),
        ("tf32", "tf32", "precision=tf32: needs a CUDA device"),
    ],
)
def test_a_precision_that_cannot_be_had_is_named(precision, name, message):
    with pytest.raises(InputError, match=message):
        resolve_precision(precision, BACKENDS[name].PRECISIONS, "cpu", name)


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("fp32", DynamicLossScale(), "loss_scale=dynamic: backend=fp32"),
        ("amp", DynamicLossScale(min_scale=1.0), "loss_scale.min_scale=1.0"),
        ("amp", DynamicLossScale(hysteresis=2), "loss_scale.hysteresis=2"),
        ("amp", Capped(), "loss_scale=capped: GradScaler has none: expected one of auto, none, static, dynamic"),
        ("fused", Capped(), "loss_scale=capped: backend=fused has none: expected one of auto, none, static, dynamic"),
    ],
)
def test_a_loss_scale_that_a_backend_cannot_do_is_named(name, policy, message):
    precision = BACKENDS[name].PRECISIONS[0]
    with pytest.raises(InputError, match=message):
        make_backend(name, make_task(), precision, CPU, policy)


def test_fused_writes_the_same_buffers_in_every_step(device):
    task = make_task()
    backend = make_backend("fused", task, "bf16", device)
    addresses = set()
    for seed in range(3):
        take_step(backend, *make_batch(task, device, seed))
        tensors = [*backend.z, backend.logits, backend.dlogits, backend.loss, *backend.params.values()]
        addresses.add(tuple(t.data_ptr() for t in [*tensors, *backend.scaled_grads.values()]))
    assert len(addresses) == 1


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_fused_keeps_rows_aligned_and_their_padding_0(device, precision):
    """Rows begin at multiples of 16 bytes, and 16-bit tensors at multiples of 256; nothing is written between them."""
    task = make_task(in_features=20, hidden=[13, 7], out_features=5, momentum=0.9)
    backend = make_backend("fused", task, precision, device, DynamicLossScale(2.0**30, growth_interval=2))
    for seed in range(8):
        x, y = make_batch(task, device, seed)
        x[0, 0] = math.inf if seed == 5 else x[0, 0]
        take_step(backend, x, y)
    for buffers in backend.parts:
        for flat in (buffers.master, *buffers.state.values(), buffers.copies, buffers.grad):
            if flat is None:
                continue
            inside = torch.zeros(flat.untyped_storage().nbytes() // flat.itemsize, dtype=torch.bool, device=device)
            whole = torch.empty(0, dtype=flat.dtype, device=device).set_(flat.untyped_storage())
            for named in (backend.masters, *backend.remembered.values(), backend.params, backend.scaled_grads):
                for view in named.values():
                    if view.untyped_storage().data_ptr() == whole.data_ptr():
                        assert view.storage_offset() % 128 == 0
                        assert view.dim() == 1 or view.stride(0) % 8 == 0
                        inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
            assert inside.any()
            assert not inside.all()
            assert (whole[~inside] == 0).all()
    assert all(z.stride(0) % 8 == 0 for z in (*backend.z[1:], backend.logits, backend.dlogits))


@pytest.mark.slow
def test_scale_of_5000_steps_equals_gradscalers(device):
    """The scale grows, overflows by itself and by injected inf, and backs off, again and again. GradScaler gets an inf
    in each step that fused skips."""
    task = make_task(hidden=[16], batch_size=8)
    fused = make_backend("fused", task, "fp16", device, DynamicLossScale(growth_interval=20))
    scaler = torch.amp.GradScaler(device.type, growth_interval=20)
    weight = torch.zeros(1, device=device, requires_grad=True)
    scaler.scale(weight.sum()).backward()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    stream = [make_batch(task, device, seed) for seed in range(50)]
    injected = torch.rand(5000, generator=torch.Generator().manual_seed(1)) < 0.01
    skipped = grown = 0
    for step in range(5000):
        x, y = stream[step % 50]
        if injected[step]:
            x = x.clone()
            x[0, 0] = math.inf
        before = float(fused.loss_scale())
        take_step(fused, x, y)
        skips = bool(fused.skipped)
        weight.grad.fill_(math.inf if skips else 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert float(fused.loss_scale()) == scaler.get_scale()
        assert skips or not injected[step]
        skipped, grown = skipped + skips, grown + (float(fused.loss_scale()) > before)
    assert skipped > injected.sum()
    assert grown > 100


def test_fused_has_no_torch_engine_and_says_what_it_lacks(monkeypatch):
    for engine, said in (("torch", "expected one of auto, native"), ("nativ", r".*\(did you mean native\?\)")):
        with pytest.raises(InputError, match=f"engine={engine}: {said}"):
            make_backend("fused", make_task(), "bf16", CPU, engine=engine)

    def broken(device_type):
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(ops, "load", broken)
    with pytest.raises(BackendUnavailable, match="backend=fused needs the native operators: no C\\+\\+ compiler"):
        make_backend("fused", make_task(), "bf16", CPU)
