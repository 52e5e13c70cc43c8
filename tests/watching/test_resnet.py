"""``mpcompare.watch`` on torchvision's resnet18, with ReLU, max pooling and batch norms: every layer is examined."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18

import mpcompare


def right() -> nn.Module:
    return resnet18(num_classes=10)


def short_norm() -> nn.Module:
    model = right()
    model.layer2[0].bn1.bfloat16()
    return model


def detached_branch() -> nn.Module:
    model = right()
    model.layer3[0].downsample.register_forward_hook(lambda module, args, y: y.detach())
    return model


def watched(model: nn.Module):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return seen


@pytest.mark.slow
def test_every_layer_of_a_right_one_is_examined():
    torch.manual_seed(0)
    model = right()
    seen = watched(model)
    assert (seen.defects, seen.not_examined) == ([], [])
    (replay,) = seen.replays
    leaves = {
        name for name, module in model.named_modules() if not list(module.children()) and list(module.parameters())
    }
    assert leaves <= {at.removeprefix("output ") for at in replay.layers.places}
    assert set(replay.layers.gradients) == {name for name, _ in model.named_parameters()}


@pytest.mark.slow
def test_a_norm_in_16_bits_is_a_defect_and_a_detached_branch_is_a_fact():
    torch.manual_seed(0)
    defect = watched(short_norm()).defects[0]
    assert (defect.cause, defect.place) == ("normalization", "layer2.0.bn1")
    seen = watched(detached_branch())  # the network's own code detaches the branch, and may mean to
    assert seen.defects == []
    assert seen.facts["without_gradient"] == [
        f"layer3.0.downsample.{name}" for name in ("0.weight", "1.bias", "1.weight")
    ]
