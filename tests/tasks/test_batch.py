"""A nest of tensors is sliced, cast, moved and named as one tensor is."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from mpcompare.errors import InputError
from mpcompare.tasks.batch import OfTrees, Tree, each, named, nbytes, take_trees, tensors_of, tree_of, without_doors
from mpcompare.tasks.data.given import dataset_of
from mpcompare.tasks.fingerprint import fingerprint
from mpcompare.tasks.losses import MaskedCrossEntropy, count_of

X, IDS = torch.arange(12.0).reshape(6, 2), torch.arange(6)


def both() -> Tree:
    return Tree({"x": X.clone(), "more": (IDS.clone(), "a word")})


def test_rows_are_taken_of_all_tensors():
    tree = both()
    assert len(tree) == 6
    assert [t.tolist() for t in tensors_of(tree[1:3])] == [[[2, 3], [4, 5]], [1, 2]]
    assert [len(part) for part in tree.split(4)] == [4, 2]
    assert tree.split(4)[1].tensors[1].tolist() == [4, 5]
    assert tree.flip(0).tensors[1].tolist() == [5, 4, 3, 2, 1, 0]
    assert tree[torch.tensor([5, 0])].tensors[1].tolist() == [5, 0]
    joined = each(lambda *parts: torch.cat(parts), *tree.split(4))
    assert torch.equal(joined.value["x"], X)
    assert joined.value["more"][1] == "a word"


def test_only_real_numbers_are_cast_and_all_are_moved():
    tree = both().to(torch.bfloat16)
    assert [t.dtype for t in tree.tensors] == [torch.bfloat16, torch.int64]
    assert tree.is_floating_point()
    assert not Tree((IDS,)).is_floating_point()
    assert [t.device.type for t in tree.to("meta").tensors] == ["meta", "meta"]
    assert Tree((torch.zeros(1), torch.zeros(1).half())).dtype is torch.float16


def test_a_fingerprint_knows_each_tensor_and_its_name():
    assert [name for name, _ in named("x", both())] == ["x['x']", "x['more'][0]"]
    plain = fingerprint({"x": X})
    assert len({plain, fingerprint({"x": Tree((X,))}), fingerprint({"x": Tree({"a": X})})}) == 3
    assert fingerprint({"x": both()}) == fingerprint({"x": both()})
    other = both()
    other.value["more"][0][3] = 9
    assert fingerprint({"x": both()}) != fingerprint({"x": other})


def test_a_tensor_that_is_input_and_target_is_counted_once():
    assert nbytes(X, Tree((X, IDS))) == X.nbytes + IDS.nbytes
    assert nbytes(X, X[:, :1]) == nbytes(X[:, :1], X) == X.nbytes


def test_a_fingerprint_is_of_any_dtype_and_stays_what_it_was():
    assert fingerprint({"x": X}) == "70178dc1fb0ac991"
    assert fingerprint({"n": torch.tensor(3)}) == "15ee4ea19e648e54"
    assert fingerprint({"x": X.bfloat16()}) != fingerprint({"x": (X + 1).bfloat16()})
    assert fingerprint({"n": torch.tensor(3.0).bfloat16()}) != fingerprint({"n": torch.tensor(3.0).half()})


def test_a_tree_is_saved_with_the_data(tmp_path):
    torch.save({"x": both()}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", mmap=True, weights_only=True)["x"]
    assert fingerprint({"x": loaded}) == fingerprint({"x": both()})


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x, y=None):
        logits = self.layer(x)
        return Output(logits, logits.mean() if y is None else logits.mean() * y.sum())


@pytest.mark.parametrize("value", [{"x": X, "y": IDS}, (X, IDS), [X, IDS]])
def test_a_network_is_called_with_what_is_in_the_tree_and_so_are_its_copies(value):
    network = Net()
    right = network(X, IDS)
    take_trees(network, inputs=True, outputs=True)
    take_trees(network, inputs=True, outputs=True)
    output = copy.deepcopy(network)(Tree(value))
    assert torch.equal(output.value.loss, right.loss)
    assert [t.dtype for t in output.to(torch.float16).tensors] == [torch.float16, torch.float16]
    again = without_doors(network)(X, IDS)
    assert isinstance(again, Output)
    hooks = (network._forward_pre_hooks, network._forward_hooks, network._forward_pre_hooks_with_kwargs)
    assert not any(hooks)


def test_a_loss_is_given_the_nests_and_counts_their_labels():
    def loss(output, y):
        return output.loss * y["weight"]

    given = OfTrees(loss, "loss")
    assert float(given(tree_of(Output(X, torch.tensor(3.0))), Tree({"weight": 2.0}))) == 6
    assert count_of(given) is None

    class OfLabels(MaskedCrossEntropy):
        def count(self, y):
            return super().count(y["labels"])

    counts = count_of(OfTrees(OfLabels(), "loss"))
    assert int(counts(Tree({"labels": torch.tensor([1, -100, 2])}))) == 2


def test_data_may_be_trees_and_must_have_as_many_rows_everywhere():
    data = dataset_of(({"a": X, "b": IDS.numpy()}, IDS, {"a": X[:2], "b": IDS[:2]}, IDS[:2]), "load")
    assert isinstance(data.x_train, Tree)
    assert data.x_train.value["b"].dtype is torch.int64
    with pytest.raises(InputError, match=r"has 6 samples in x_train\['a'\], and 5 in x_train\['b'\]"):
        dataset_of(({"a": X, "b": IDS[:5]}, IDS, {"a": X, "b": IDS}, IDS), "load")
    with pytest.raises(InputError, match="y_train is an empty dict: expected samples"):
        dataset_of((X, {}, X, {}), "load")
    with pytest.raises(
        InputError, match=r"x_test has samples \['a'\] \[2\] float32, and x_train \['a'\] \[1\] float32"
    ):
        dataset_of(({"a": X[:, :1]}, IDS, {"a": X}, IDS), "load")
