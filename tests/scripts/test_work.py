import pytest
import torch
import work
from support.tasks import make_batch, make_task, mlp_of

from mpcompare.cost import step_flops


def test_the_products_of_a_step_are_the_products_of_its_phases():
    for hidden in ([], [8], [24, 16]):
        task = make_task(hidden=hidden)
        by_phase = work.phases(mlp_of(task), "fp16")
        model = task.new_model(0, torch.device("cpu"))
        counted = step_flops(model, task.loss_fn, *make_batch(task, torch.device("cpu")))
        assert by_phase["forward"].flops + by_phase["backward"].flops == counted


def test_traffic_counts_each_tensor_once():
    task = mlp_of(make_task(in_features=784, hidden=[8192], out_features=10, batch_size=8192))
    params = 784 * 8192 + 8192 + 8192 * 10 + 10
    z1, x, logits = 8192 * 8192, 8192 * 784, 8192 * 10
    found = work.phases(task, "fp16")
    assert found["forward"].bytes == 4 * x + 8 * 8192 + 2 * (params + z1 + logits) + 4
    assert found["backward"].bytes == 2 * (x + z1 + logits + (8192 * 10 + 10) + params)  # W2, and dW of all
    assert found["unscale to update"].bytes == (4 + 2 + 4) * params  # master in, gradient, master out
    assert work.step(task, "fp16").bytes == sum(each.bytes for each in found.values())
    momentum = work.phases(mlp_of(make_task(momentum=0.9)), "fp32")["unscale to update"]
    plain = work.phases(mlp_of(make_task()), "fp32")["unscale to update"]
    assert momentum.bytes == 5 / 3 * plain.bytes  # its state in and out


def test_an_operator_reads_its_inputs_and_writes_its_outputs():
    assert work.gemm(2, 3, 5, 2) == work.Work(60, 2 * (6 + 15 + 10))
    assert work.linear(2, 3, 5, 2).bytes == 2 * (6 + 15 + 10 + 5)
    backward = work.linear_backward(2, 3, 5, 4)
    assert backward.bytes == 4 * (2 * 5 + 2 * 3 * 5 + 2 * 2 * 3 + 3)  # da, W and dW, z in and out, db
    assert backward.flops == work.gemm(3, 2, 5, 4).flops + work.gemm(2, 5, 3, 4).flops + 2 * 3
    assert work.cross_entropy(4, 10, 2).bytes == 2 * 2 * 40 + 8 * 4
    assert work.sgd(7, 2).bytes == 7 * (4 + 4 + 2)
    assert work.sgd(7, 4, momentum=True).bytes == 7 * (4 + 4 + 4 + 4 + 4)
    assert work.adam(7, 2).bytes == 7 * (3 * (4 + 4) + 2)
    assert work.gemm(8192, 784, 8192, 2).intensity == pytest.approx(784 * 8192 / (2 * 784 + 8192))
