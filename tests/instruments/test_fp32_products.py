"""The flags of torch's products in fp32, in both styles."""

import pytest
import torch
from torch import nn

from mpcompare.instruments import fp32_products
from mpcompare.instruments.fp32_products import are_tf32, precisions, set_tf32, tf32

MESSES = {
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "all in tf32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "mkldnn in bf16": lambda: setattr(torch.backends.mkldnn, "fp32_precision", "bf16"),
    "matmul in bf16": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "old style": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "conv": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def _as_before():
    with tf32(False):
        for flag in fp32_products._FLAGS.values():
            flag.fp32_precision = "none"
        yield


@pytest.mark.parametrize("mess", MESSES)
def test_every_flag_of_either_style_is_set(mess):
    MESSES[mess]()
    assert set(precisions().values()) - {"ieee", "none"}
    set_tf32(False)
    assert set(precisions().values()) <= {"ieee", "none"}
    assert torch.get_float32_matmul_precision() == "highest"  # torch refuses to read it where the styles differ
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)


@pytest.mark.parametrize("mess", MESSES)
def test_a_block_leaves_the_flags_as_they_were(mess):
    MESSES[mess]()
    before = precisions()
    with tf32(False):
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    assert precisions() == before


def test_a_flag_that_followed_a_wider_one_follows_it_after_a_block():
    torch.backends.fp32_precision = "tf32"
    torch.backends.mkldnn.rnn.fp32_precision = "bf16"
    before = precisions()
    with tf32(False):
        pass
    assert precisions() == before
    torch.backends.fp32_precision = "ieee"
    assert {name: value for name, value in precisions().items() if value != "ieee"} == {"mkldnn.rnn": "bf16"}


def test_tf32_is_allowed_on_cuda_alone_and_can_be_read_in_the_old_style():
    set_tf32(True)
    on = precisions()
    assert {name for name, value in on.items() if value == "tf32"} == {"cuda.matmul", "cudnn.conv", "cudnn.rnn"}
    assert torch.backends.cuda.matmul.allow_tf32
    with tf32(False):
        assert "tf32" not in precisions().values()
    assert precisions() == on
    assert torch.backends.cuda.matmul.allow_tf32


def test_a_network_on_a_gpu_is_in_tf32_where_one_of_its_products_may_be():
    linear, convolution = nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    with tf32(False):
        assert not any(are_tf32(network, gpu) for network in (linear, convolution))
        torch.backends.cudnn.allow_tf32 = True  # as torch does by itself
        assert (are_tf32(linear, gpu), are_tf32(convolution, gpu)) == (False, True)
    with tf32(True):
        assert are_tf32(linear, gpu)
        assert not are_tf32(convolution, cpu)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_block_leaves_the_flag_of_cudnn_as_it_was(allowed):
    torch.backends.cudnn.allow_tf32 = allowed  # the default of torch is True
    with tf32(False):
        assert not torch.backends.cudnn.allow_tf32
    with torch.backends.cudnn.flags(enabled=False):  # reads it, as networks with a CTC loss do
        pass
    assert torch.backends.cudnn.allow_tf32 == allowed
