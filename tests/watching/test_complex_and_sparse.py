"""A watch on parameters of complex numbers, and on sparse gradients."""

from collections.abc import Callable

import pytest
import torch
from support.marks import slow_after
from support.unusual import Operator
from support.watched_loops import Loop, spoil
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpcompare


class Spectral(nn.Module):
    """A layer of a Fourier neural operator (Li et al., ICLR 2021), in one dimension: x [B, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(9, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=16)


class Around(nn.Module):
    """A spectral layer with a layer within it, so that its own weight is used between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(16, 16), nn.Parameter(1 + 0.3 * torch.randn(9, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=16))
        return result


class OfComplex(nn.Module):
    """All of its layers are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(16, size, dtype=torch.complex64) for size in (16, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x.to(torch.complex64)).tanh()).abs()
        return result


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(32, 16, sparse=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.words(x).mean(1).tanh())
        return result


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def complex_loop(layer: type[nn.Module], dtype: torch.dtype, adam: bool) -> Loop:
    made = Loop(
        make=lambda: nn.Sequential(nn.Linear(16, 16), layer(), nn.GELU(), nn.Linear(16, 10)),
        batch=lambda: (torch.randn(32, 16), torch.randint(10, (32,))),
        dtype=dtype,
    )
    if not adam:
        made.optimizer = sgd
    return made


# A GradScaler on a CPU takes no complex gradients.
@pytest.mark.parametrize(
    ("layer", "dtype", "adam"),
    [
        (Spectral, torch.bfloat16, True),
        pytest.param(Around, torch.float32, False, marks=pytest.mark.slow),
        pytest.param(Spectral, torch.float32, True, marks=pytest.mark.slow),
        pytest.param(Around, torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_complex_parameters_are_examined(layer: type[nn.Module], dtype: torch.dtype, adam: bool) -> None:
    loop = complex_loop(layer, dtype, adam)
    seen = loop.run(mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], []), str(seen)
    assert seen.facts["optimizer"] == ("AdamW" if adam else "SGD")
    bits = loop.weights()
    loop.run()
    assert all(torch.equal(a, b) for a, b in zip(bits, loop.weights(), strict=True))


class Again(Operator):
    """Backward computes it once more."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("make", slow_after(2, [OfComplex, Operator, Again]))
def test_modules_of_complex_numbers_are_examined_as_work_between_layers(make: Callable[[], nn.Module]) -> None:
    loop = Loop(make=make, batch=lambda: (torch.randn(32, 16), torch.randint(4, (32,))), dtype=torch.bfloat16)
    seen = loop.run(mpcompare.watch)
    assert (seen.defects, seen.not_examined) == ([], []), str(seen)
    parameters = len(list(make().parameters()))
    assert f"{parameters} of {parameters} parameters are seen" in str(seen)


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [(Around, lambda g: g / 2), pytest.param(Spectral, torch.conj_physical, marks=pytest.mark.slow)],
)
def test_a_wrong_complex_gradient_is_seen(layer: type[nn.Module], wrong: object) -> None:
    loop = complex_loop(layer, torch.bfloat16, True)
    make = loop.make

    def spoilt() -> nn.Module:
        model = make()
        spoil(model[1].weight, wrong)  # type: ignore[index, arg-type]
        return model

    loop.make = spoilt
    seen = loop.run(mpcompare.watch)
    assert {defect.place for defect in seen.defects} == {"1.weight"}, str(seen)


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [
        (torch.float16, 0.1),
        pytest.param(torch.float32, 0.1, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.slow),
    ],
)
def test_sparse_gradients_are_examined(dtype: torch.dtype, clip: float | None) -> None:
    loop = Loop(make=Words, optimizer=sgd, dtype=dtype, clip=clip)
    try:
        loop.run()
    except NotImplementedError:  # torch 2.11
        pytest.skip("this torch clips no sparse gradients")
    seen = loop.run(mpcompare.watch)
    assert seen.defects == [], str(seen)
    reason = "the rows of the sparse gradient of words.weight are added one by one"
    assert seen.not_examined == [f"updates of words.weight ({reason})"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["words", "linear"])
def test_a_wrong_gradient_is_seen_where_one_is_sparse(name: str) -> None:
    def make() -> nn.Module:
        model = Words()
        spoil(model.get_submodule(name).weight, lambda g: 0.5 * g)  # type: ignore[arg-type]
        return model

    seen = Loop(make=make, optimizer=sgd, clip=None).run(mpcompare.watch)
    assert {defect.place for defect in seen.defects} == {f"{name}.weight"}, str(seen)
