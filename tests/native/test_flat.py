import torch
from support.tasks import make_task, mlp_of

from mpcompare.native import flat
from mpcompare.tasks.task import params_of


def test_views_are_the_parameters_aligned_and_apart():
    sizes = (20, 13, 300, 5)
    buffer = torch.zeros(flat.elements(sizes))
    views = flat.views(buffer, sizes)
    task = make_task(in_features=20, hidden=[13, 300], out_features=5)
    initial = mlp_of(task).by_hand(params_of(task.new_model(0, torch.device("cpu"))))
    assert list(views) == list(initial)
    for number, (name, view) in enumerate(views.items(), start=1):
        assert view.shape == initial[name].shape
        assert view.storage_offset() % 128 == 0
        assert view.dim() == 1 or view.stride() == (flat.row_elements(view.shape[1]), 1)
        view.fill_(number)
    for number, view in enumerate(views.values(), start=1):
        assert (view == number).all()  # nobody wrote into another's place
    assert buffer.count_nonzero() == sum(p.numel() for p in initial.values())


def test_a_buffer_may_begin_later():
    sizes = (20, 13, 5)
    whole = torch.arange(flat.elements(sizes))
    begin = flat.sections(sizes)["W1"][1]
    later = flat.views(whole[begin:], sizes, begin)
    assert list(later) == ["b1", "W2", "b2"]
    for name, view in later.items():
        assert torch.equal(view, flat.views(whole, sizes)[name])


def test_rows_are_rounded_up_to_16_bytes():
    assert [flat.row_elements(columns) for columns in (1, 8, 9, 784, 10)] == [8, 8, 16, 784, 16]
    x = flat.matrix(3, 10, torch.float16, torch.device("cpu"))
    assert x.shape == (3, 10)
    assert x.stride() == (16, 1)
