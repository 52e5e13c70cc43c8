"""Masked labels: the loss of a step is the mean over all labels that count, whatever the micro-batch they are in."""

from functools import partial

import pytest
import torch
from planted.masked import make
from support.backends import BACKENDS, make_backend
from support.marks import slow_after
from torch.nn import functional as F

from mpcompare import contract
from mpcompare.backends.torch_model import share_of_step
from mpcompare.contract import BackendUnavailable
from mpcompare.entrant.evaluation import score
from mpcompare.errors import InputError
from mpcompare.loss_scale import NoLossScale
from mpcompare.precision import PRECISIONS
from mpcompare.tasks.data.text import topics
from mpcompare.tasks.losses import LOSSES, count_of, cross_entropy, mse, shares
from mpcompare.tasks.trial import try_out
from mpcompare.verdict.examine.oracle import exact_step
from mpcompare.verdict.examine.parts_of_batch import rows_are_independent

MASKED = LOSSES["masked_cross_entropy"]
TASK, DATA = make()
CPU = torch.device("cpu")


def smooth(output, y, smoothing=0.1):
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), label_smoothing=smoothing)


smooth.count = lambda y: (y != -100).sum()


def batch():
    return DATA.x_train[: TASK.batch_size], DATA.y_train[: TASK.batch_size]


def test_the_masked_loss_is_torchs_with_ignore_index_and_0_without_labels():
    torch.manual_seed(0)
    output, y = torch.randn(3, 5, 7, requires_grad=True), torch.randint(7, (3, 5))
    assert torch.equal(MASKED(output, y), F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum") / 15)
    y[0], y[1, 2] = -100, -100
    torch.testing.assert_close(MASKED(output, y), F.cross_entropy(output.flatten(0, 1), y.flatten()))
    y[:] = -100
    MASKED(output, y).backward()
    assert MASKED(output, y) == 0
    assert not output.grad.any()


def test_shares_are_the_shares_of_the_labels():
    y = [torch.tensor([1, -100, -100]), torch.tensor([1, 2, 3]), torch.tensor([-100] * 3)]
    assert [float(share) for share in shares(MASKED, y)] == [0.25, 0.75, 0.0]
    assert [float(share) for share in shares(MASKED, y[2:])] == [0.0]
    assert count_of(partial(smooth, smoothing=0.2)) is smooth.count  # as Hydra's _partial_ makes one
    assert [float(share) for share in shares(partial(smooth, smoothing=0.2), y)] == [0.25, 0.75, 0.0]
    assert shares(cross_entropy, y) is shares(mse, y) is None
    loss = torch.tensor(3.0)
    assert (share_of_step(TASK, loss), share_of_step(TASK, loss, torch.tensor(0.5))) == (0.75, 1.5)


@pytest.mark.parametrize("loss", [MASKED, smooth], ids=["masked_cross_entropy", "own"])
@pytest.mark.parametrize("name", slow_after(1, ["amp", "fp32", "master_weights"]))
def test_micro_batches_make_the_gradient_of_the_whole_batch(name, loss):
    precision = "fp32" if name == "fp32" else "bf16"
    task, _ = make(loss=loss)
    whole, _ = make(loss=loss, accumulate=1)
    x, y = batch()
    found = []
    for each in (task, whole):
        backend = make_backend(name, each, precision, CPU)
        found.append(contract.show_gradients(backend, each.micro_batches(x, y), 0.1))
    (loss_of_parts, of_parts), (loss_of_whole, of_whole) = found
    torch.testing.assert_close(loss_of_parts, loss_of_whole, rtol=1e-5 if name == "fp32" else 1e-3, atol=0)
    for tensor, g in of_whole.items():
        assert (of_parts[tensor] - g).norm() <= (1e-5 if name == "fp32" else 0.02) * g.norm() + 1e-6, tensor


def test_the_oracle_of_micro_batches_is_the_oracle_of_the_whole_batch():
    model = TASK.new_model(0, CPU)
    x, y = batch()
    parts = exact_step(model, MASKED, TASK.micro_batches(x, y), PRECISIONS["fp32"])
    whole = exact_step(model, MASKED, [(x, y)], PRECISIONS["fp32"])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert all(torch.allclose(g, whole.grads[name], rtol=1e-9, atol=1e-14) for name, g in parts.grads.items())
    assert sum(parts.weights) == pytest.approx(4)
    assert max(parts.weights) > 1.2  # the micro-batches have other numbers of labels indeed
    assert rows_are_independent(model.double(), MASKED, x, y)


def test_evaluation_counts_labels_and_not_tokens():
    task, data = make(batch_size=8, accumulate=2)
    answers = data.y_test.clamp(min=0)
    right = torch.zeros(*answers.shape, 96).scatter_(2, answers[..., None], 100.0)
    table = {row.numpy().tobytes(): out for row, out in zip(data.x_test, right, strict=True)}
    scores = score(lambda x: torch.stack([table[row.numpy().tobytes()] for row in x]), data, task)
    assert scores["test_accuracy"] == 1
    assert scores["test_loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_prompts_are_left_out():
    plain, masked = topics(0, 24), topics(0, 24, masked=0.25)
    share = (masked.y_train == -100).double().mean()
    assert share == pytest.approx(0.25, abs=0.02)
    assert torch.equal(masked.y_train[masked.y_train >= 0], plain.y_train[masked.y_train >= 0])
    hidden = masked.y_train == -100
    assert bool((hidden.int().diff(dim=1) <= 0).all())  # a prompt is the beginning of a window
    with pytest.raises(InputError, match=r"^data\.masked=0\.5: expected a finite number of at least 0 and below 0\.5$"):
        topics(0, 24, masked=0.5)


@pytest.mark.parametrize(
    ("loss", "label", "message"),
    [
        ("cross_entropy", -100, "ValueError: a label is -100, and masked_cross_entropy leaves out labels of -100"),
        ("masked_cross_entropy", -1, "ValueError: a label is -1, and masked_cross_entropy leaves out labels of -100"),
        ("masked_cross_entropy", 96, "ValueError: labels go up to 96"),
        ("masked_cross_entropy", None, "ValueError: every label is left out"),
    ],
)
def test_labels_that_are_no_classes_are_named(loss, label, message):
    task, _ = make(loss=loss)
    y = torch.zeros_like(DATA.y_train)
    y[-1, -1] = 0 if label is None else label
    y = y if label is not None else y.fill_(-100)
    with pytest.raises(InputError, match=message):
        try_out(task.new_model(0, CPU), task, DATA.x_train, y, "text")


@pytest.mark.slow
def test_backends_by_hand_have_no_masked_loss():
    for name in ("scratch", "fused"):
        task, _ = make(model=torch.nn.Linear)
        task = type(task)(lambda: torch.nn.Sequential(torch.nn.Linear(3, 2)), "masked_cross_entropy", task.optimizer, 4)
        with pytest.raises(BackendUnavailable, match="not another loss"):
            BACKENDS[name](task.new_model(0, CPU), task, "bf16", NoLossScale())
