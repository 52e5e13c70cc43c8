"""The pass at weights at which nothing is nearly linear."""

from dataclasses import replace

import pytest
import torch
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task
from torch import nn

from mpcompare.precision import PRECISIONS
from mpcompare.report.verdicts import judge_run
from mpcompare.tasks.text import CharGpt, CharLstm
from mpcompare.verdict.examine.ground import Ground
from mpcompare.verdict.examine.oracle import outputs_of
from mpcompare.verdict.examine.sharp import OF_LOGITS, SPREAD, few_rows, sharpened

TASK = make_task(in_features=20, hidden=[64], out_features=5, batch_size=64, samples=64 * 4)
SMOOTH = replace(TASK, model=lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5)))
IDS = torch.randint(30, (8, 16), generator=torch.Generator().manual_seed(0))
FP16 = PRECISIONS["fp16"]


def new(make):
    torch.manual_seed(0)
    return make()


def test_products_spread_and_every_precision_holds_the_weights():
    model = new(lambda: CharGpt(30, 16, 32, 4, 2))
    params = sharpened(model, IDS, FP16)
    assert all(torch.equal(p.half().float(), p) for p in params.values())
    again = sharpened(model, IDS, FP16)
    assert all(torch.equal(p, again[name]) for name, p in params.items())
    for name, p in model.named_parameters():
        p.data = params[name]
    with outputs_of(model) as outputs:
        model(IDS)
    for name in ("blocks.0.attention.qkv", "blocks.1.up"):
        assert outputs.tensors[name].std().item() == pytest.approx(SPREAD, rel=0.15)
    assert outputs.tensors["output"].std().item() == pytest.approx(OF_LOGITS, rel=0.15)
    assert model.norm.weight.std() > 0.1  # they were all 1
    assert model.blocks[0].up.bias.std() > 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Embedding(30, 8), nn.GRU(8, 8, bidirectional=True), nn.Identity()),
        lambda: CharLstm(30, 8),
        lambda: nn.Sequential(nn.Embedding(30, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))),
    ],
)
def test_layers_whose_products_cannot_be_seen_have_finite_weights_too(make):
    model = new(make)
    if isinstance(model[-1] if isinstance(model, nn.Sequential) else None, nn.Identity):
        model[-1].forward = lambda outputs: outputs[0]
    params = sharpened(model, IDS, FP16)
    assert set(params) == {name for name, _ in model.named_parameters()}
    assert all(p.isfinite().all() and p.any() for p in params.values())


def test_a_layer_that_begins_at_0_is_drawn():
    model = new(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    nn.init.zeros_(model[1].weight)
    params = sharpened(model, torch.randn(64, 8), FP16)
    assert params["1.weight"].std() > 0.5


def test_rows_are_left_out_where_they_do_not_depend_on_each_other():
    model, loss = TASK.new_model(0, torch.device("cpu")), TASK.loss_fn
    x, y = torch.randn(96, 20), torch.randint(5, (96,))
    assert len(few_rows(Ground(model, loss, [(x, y)]))[0]) == 32
    assert len(few_rows(Ground(model, loss, [(x[:97], y[:97])]))[0]) == 32
    assert len(few_rows(Ground(model, loss, [(x[:53], y[:53])]))[0]) == 53
    normed = nn.Sequential(nn.BatchNorm1d(20), model)
    assert len(few_rows(Ground(normed, loss, [(x, y)]))[0]) == 96


def test_a_network_that_draws_random_numbers_is_left_out():
    task = replace(TASK, model=lambda: nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 5)))
    run = examined("amp", BACKENDS["amp"], task, dataset_of(TASK), "bf16", steps=2)
    assert run.findings.first.gradients
    assert run.findings.sharp is None


def test_a_network_with_kinks_is_left_out():
    assert examined("amp", BACKENDS["amp"], TASK, dataset_of(TASK), "bf16", steps=2).findings.sharp is None


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_correct_backend_is_as_near_to_the_oracle_as_roundings_and_sums_let_it_be(precision, accumulate):
    backend = BACKENDS["fp32" if precision == "fp32" else "amp"]
    run = examined("amp", backend, replace(SMOOTH, accumulate=accumulate), dataset_of(TASK), precision, steps=2)
    sharp, first = run.findings.sharp, run.findings.first.finite
    assert sharp.step.exact_loss > 2 * first.exact_loss
    assert sharp.step.micro_batches is None
    checks = [
        check
        for check in judge_run(replace(run, name="again"), run).checks
        if check.name.startswith("gradient at sharp")
    ]
    assert len(checks) == len(sharp.step.gradients) == 4
    assert all(0 < check.value <= check.limit < 0.2 for check in checks)
