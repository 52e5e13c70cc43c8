"""The ablations of scratch: the numbers that change if a technique is taken away, and the verdict's causes."""

from functools import partial

import pytest
import torch
from support.backends import make_backend, take_step
from support.judging import dataset_of, examined
from support.marks import slow_after
from support.tasks import make_batch, make_task

from mpcompare.backends.amp import Amp
from mpcompare.backends.scratch import Scratch
from mpcompare.cost import allocated_bytes
from mpcompare.errors import InputError
from mpcompare.instruments import meter
from mpcompare.loss_scale import NoLossScale, StaticLossScale
from mpcompare.native import ops
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.fingerprint import fingerprint

CPU = torch.device("cpu")


def scratch(task, precision, device=CPU, policy=None, **options):
    return Scratch(task.new_model(0, device), task, precision, policy or NoLossScale(), **options)


# ---- nothing taken away


@pytest.mark.parametrize("precision", slow_after(1, ["bf16", "fp16", "fp32"]))
@pytest.mark.parametrize("momentum", slow_after(1, [0.9, 0.0]))
def test_the_defaults_take_nothing_away(precision, momentum):
    task = make_task(momentum=momentum)
    plain = make_backend("scratch", task, precision, CPU)
    explicit = scratch(task, precision, master_params=True, accumulate_dtype="fp32", softmax="fp32")
    assert explicit.gemm is plain.gemm
    assert explicit.engine == plain.engine == "native"
    for seed in range(4):
        batch = make_batch(task, CPU, seed)
        assert take_step(plain, *batch).item() == take_step(explicit, *batch).item()
    assert fingerprint(plain.master_params()) == fingerprint(explicit.master_params())
    for name, p in plain.mlp.named(plain.masters).items():
        assert plain.master_params()[name].data_ptr() == p.data_ptr()  # fp32: no copies


# ---- (1) master weights


@pytest.mark.parametrize(("precision", "digits"), [("fp16", 11), ("bf16", 8)])
def test_without_masters_an_update_below_half_a_gap_is_lost(device, precision, digits):
    """Weights of 1 have the gap 2^(1-digits) above them and half of that below; the bias's gradient is 2/3 here."""
    task = make_task(in_features=1, hidden=[], out_features=1, loss="mse", batch_size=3, lr=2.0**-digits / 2)
    x, y = torch.zeros(3, 1, device=device), torch.tensor([[0.0], [1.0], [1.0]], device=device)  # mean 2 (1 - y) = 2/3
    moved = {}
    for master_params in (True, False):
        backend = scratch(task, precision, device, master_params=master_params)
        for master in backend.masters.values():
            master.fill_(1)
        take_step(backend, x, y)
        moved[master_params] = 1 - backend.master_params()["layer1.bias"].item()
    assert moved[True] == pytest.approx(2.0**-digits / 3, rel=0.01)
    assert moved[False] == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_masters_the_optimizer_has_16_bit_weights_and_says_so(device, momentum):
    task = make_task(momentum=momentum)
    backend = scratch(task, "fp16", device, StaticLossScale(1024.0), master_params=False)
    assert take_step(backend, *make_batch(task, device)).dtype == torch.float32
    assert backend.dtypes() == {
        "params": "fp16", "activations": "fp16", "loss": "fp32", "gradients": "fp16", "optimizer": "fp16",
    }  # fmt: skip
    for p in backend.master_params().values():
        assert p.dtype == torch.float32
        assert torch.equal(p, p.half().float())
    again = scratch(task, "fp16", device, StaticLossScale(1024.0), master_params=False)
    again.load_state_dict(backend.state_dict())
    batch = make_batch(task, device, 1)
    assert take_step(again, *batch).item() == take_step(backend, *batch).item()
    assert fingerprint(again.master_params()) == fingerprint(backend.master_params())


# ---- (3) sums


@pytest.mark.parametrize(("accumulate", "stops_at"), [(torch.float16, 32768.0), (torch.bfloat16, 4096.0)])
def test_a_sum_of_ones_stops_where_16_is_half_a_gap(device, accumulate, stops_at):
    """Ones are added 16 at a time. The gap is 32 from 2^15 on in fp16, from 2^12 on in bf16, and ties go to even."""
    ones, out = torch.ones(1, 40000, device=device), torch.empty(1, 1, device=device)
    ops.low_gemm(accumulate)(ones, ones, out, trans_b=True)
    assert out.item() == stops_at
    ops.torch_gemm(ones, ones, out, trans_b=True)
    assert out.item() == 40000


def test_each_block_is_summed_exactly_and_the_total_rounded():
    """Added to 2048, 1 is half a gap of fp16 and is lost; 16 ones in one block are not."""
    a = torch.zeros(2, 16 * 100, dtype=torch.float16)
    a[:, 0] = 2048
    a[0, 16::16] = 1  # one in each block
    a[1, 16:32] = 1
    out = torch.empty(2, 1, dtype=torch.float16)
    ops.low_gemm(torch.float16)(a, torch.ones(1600, 1, dtype=torch.float16), out)
    assert out.flatten().tolist() == [2048, 2064]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, False), (False, True), (True, True)])
def test_summed_in_fp32_it_is_the_product(device, dtype, trans_a, trans_b):
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random).to(device, dtype)

    a, b, c = draw(*((37, 5) if trans_a else (5, 37))), draw(*((7, 37) if trans_b else (37, 7))), draw(5, 7)
    found, expected = c.clone(), c.clone()
    how = {"trans_a": trans_a, "trans_b": trans_b, "alpha": 0.5, "beta": 2.0}
    ops.low_gemm(torch.float32)(a, b, found, **how)
    ops.torch_gemm(a, b, expected, **how)
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=40 * 2.0**-24)
    found.fill_(float("nan"))  # beta = 0 never reads it
    ops.low_gemm(torch.float32)(a, b, found, trans_a=trans_a, trans_b=trans_b)
    assert found.isfinite().all()


def test_sums_in_16_bits_are_of_plain_torch():
    backend = scratch(make_task(), "fp32", accumulate_dtype="fp16")
    assert backend.engine == "torch"
    assert take_step(backend, *make_batch(make_task(), CPU)).isfinite()  # in fp32 too
    with pytest.raises(InputError, match="engine=native: sums in fp32"):
        ops.select_gemm("native", CPU, torch.float16, torch.float16)


# ---- (3) softmax and loss


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize(("softmax", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_loss_has_the_digits_of_its_dtype(device, precision, loss, softmax, dtype):
    task = make_task(loss=loss)
    backend = scratch(task, precision, device, softmax=softmax)
    batch = make_batch(task, device)
    found = backend.forward(*batch)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert torch.equal(found, found.to(dtype).float())
    assert backend.dlogits.dtype == dtype
    exact = scratch(task, precision, device).forward(*batch)
    assert not torch.equal(exact, exact.to(dtype).float())
    assert found.item() == pytest.approx(exact.item(), rel=8 * torch.finfo(dtype).eps)
    backend.backward()
    assert backend.dtypes()["loss"] == softmax


# ---- what else has to stay right


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"master_params": False}, {"softmax": "fp16"}, {"softmax": "bf16"}])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_memory_model_is_what_is_measured(options, precision, momentum):
    task = make_task(in_features=200, hidden=[300, 250], out_features=400, batch_size=512, momentum=momentum)
    x, y = make_batch(task, CPU)

    initial, made = task.new_model(0, CPU), []

    def two_steps():
        made.append(Scratch(initial, task, precision, NoLossScale(), **options))
        for _ in range(2):
            take_step(made[0], x, y)

    measured = meter.peak_memory(CPU, two_steps).bytes + x.nbytes + y.nbytes
    model = allocated_bytes(made[0].memory_model())
    assert measured == pytest.approx(model, rel=0.01)


# ---- the verdict

ABLATIONS = {
    "no master weights": ({"master_params": False}, None, "no master weights"),
    "accumulate fp16": ({"accumulate_dtype": "fp16"}, None, "products"),
    "complete": ({}, None, ""),
    "no loss scale": ({}, NoLossScale(), "underflow"),
    "softmax fp16": ({"softmax": "fp16"}, None, "loss"),
}


@pytest.fixture(scope="module")
def deep():
    """Returns a task like the one in conf/experiment/ablations.yaml, but smaller, its data, and a run of ``amp``."""
    task = make_task(in_features=784, hidden=[64] * 4, out_features=10, batch_size=4096, samples=4096 * 2, lr=0.01)
    dataset = dataset_of(task)
    return task, dataset, examined("amp", Amp, task, dataset, "fp16", steps=2, noise=1)


@pytest.mark.parametrize("name", slow_after(0, ABLATIONS))
def test_the_verdict_names_what_was_taken_away(deep, name):
    options, policy, cause = ABLATIONS[name]
    task, dataset, reference = deep
    run = examined("scratch", partial(Scratch, **options), task, dataset, "fp16", policy=policy, steps=2)
    verdict = judge_run(run, reference)
    assert (verdict.word, verdict.cause) == ("differs" if cause else "same", cause), verdict.because
    if name == "no loss scale":
        assert "at loss scale 1, " in verdict.because
        own, of_reference = (each.findings.first.finite.subnormal for each in (run, reference))
        assert own > 0.9 > 0.1 > of_reference


@pytest.mark.slow
def test_bf16_needs_no_loss_scale(deep):
    task, dataset, _ = deep
    runs = [examined("scratch", Scratch, task, dataset, "bf16", policy=p, steps=2) for p in (None, NoLossScale())]
    assert judge_run(runs[1], runs[0]).word != "differs"
