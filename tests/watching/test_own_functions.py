"""Backward methods of the user's own, compared with the derivative of their forward methods."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcompare
from mpcompare.watching.watched import Watch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad


class TenPercentLess(Square):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 1.8 * ctx.saved_tensors[0] * grad


class InTwoMethods(torch.autograd.Function):
    """The mistake of ``Square``, in a function whose context is set up by a method of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 1.8 * ctx.saved_tensors[0] * grad


class OfACast(Square):
    """The mistake of ``TenPercentLess``, in a function that casts to 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x.bfloat16().float()
        return y * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 1.8 * ctx.saved_tensors[0] * grad


class OfAnother(Square):
    """Calls the forward and the backward method of another function, with its own context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * Square.forward(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * Square.backward(ctx, grad)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class ThroughTheClamp(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-0.1, 0.1)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class PartlyDetached(torch.autograd.Function):
    """A function whose backward method is right. Torch's derivative of its forward method is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + x.detach() ** 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return (1 + 2 * ctx.saved_tensors[0]) * grad


class WithoutGrad(Square):
    """No operation of its forward method can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x * x


class Noisy(torch.autograd.Function):
    """Draws random numbers: the same numbers in each call from one state of the generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(x, noise)
        return x * x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, noise = ctx.saved_tensors
        return 2 * x * noise * grad


class SumOfSquares(torch.autograd.Function):
    """A loss: the mean of squares of differences, times a factor that its gradient may not have."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor, factor: float, given: float) -> Tensor:
        ctx.save_for_backward(output, target)
        ctx.factor = given
        return factor * ((output.float() - target) ** 2).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        output, target = ctx.saved_tensors
        difference = 2 * (output.float() - target) / target.numel()
        return (ctx.factor * difference * grad).to(output.dtype), None, None, None


class OfFloatsOnly(SumOfSquares):
    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor, factor: float, given: float) -> Tensor:
        if output.dtype is torch.float64:
            raise RuntimeError("no kernel for double")
        return SumOfSquares.forward(ctx, output, target, factor, given)


class Both(torch.autograd.Function):
    """A function with two results, that takes a dtype. The first result has a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return (x * x).to(dtype), x.exp().to(dtype)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (1.5 * x * first + x.exp() * second).to(x.dtype), None


both = Both.apply  # as many name their functions, before any watch


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x))


def trained(
    function: Any = None, loss: Any = F.mse_loss, watch: bool = True, layer: nn.Module | None = None
) -> tuple[Watch | None, nn.Module]:
    torch.manual_seed(0)
    layer = layer or (nn.Identity() if function is None else Calls(function))
    network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), layer, nn.Linear(16, 4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with mpcompare.watch(network, optimizer, steps=2) if watch else nullcontext() as seen:
        for _ in range(2):
            x, y = torch.randn(32, 8), torch.randn(32, 4)
            with torch.autocast("cpu", torch.bfloat16):
                output = network(x)
            optimizer.zero_grad()
            loss(output.float() if loss is F.mse_loss else output, y).backward()
            optimizer.step()
    return seen, network


@pytest.mark.slow
@pytest.mark.parametrize("function", [TenPercentLess, OfACast, InTwoMethods])
def test_a_wrong_backward_method_is_a_wrong_gradient_of_the_layer_before(function: Any) -> None:
    seen, _ = trained(function)
    assert seen is not None
    assert {(d.cause, d.place) for d in seen.defects} == {("input gradient", "2.linear")}
    assert "10 % off" in seen.defects[0].sentence
    assert seen.facts["own_backward"] == {function.__name__: 0.1}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (Square, 0.0),
        pytest.param(OfAnother, 0.0, marks=pytest.mark.slow),
        (Noisy, 0.0),
        (StraightThrough, "believed"),
        pytest.param(ThroughTheClamp, "believed", marks=pytest.mark.slow),
        pytest.param(Reversed, "believed", marks=pytest.mark.slow),
        pytest.param(PartlyDetached, "believed", marks=pytest.mark.slow),
        pytest.param(WithoutGrad, "believed", marks=pytest.mark.slow),
    ],
)
def test_a_backward_method_that_is_right_or_meant_so_is_no_defect(function: Any, said: Any) -> None:
    seen, _ = trained(function)
    assert seen is not None
    assert seen.verdict == "no defect"
    assert seen.facts["own_backward"] == {function.__name__: said}
    assert seen.not_examined == []


@pytest.mark.slow
def test_a_loss_is_replayed_with_the_derivative_of_its_own_forward_method() -> None:
    right, _ = trained(loss=lambda output, y: SumOfSquares.apply(output, y, 3.0, 3.0))
    assert right is not None
    assert (right.verdict, right.not_examined) == ("no defect", [])
    wrong, _ = trained(loss=lambda output, y: SumOfSquares.apply(output, y, 3.0, 2.0))
    assert wrong is not None
    assert {d.cause for d in wrong.defects} == {"loss"}
    assert "33 % off" in wrong.defects[0].sentence
    assert wrong.facts["own_backward"] == {"SumOfSquares": 0.33}


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.factor = factor
        return x * gate.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, gate = ctx.saved_tensors
        return grad * gate.to(grad.dtype), (ctx.factor * grad * x).sum(0).to(gate.dtype), None


class Gated(nn.Module):
    """Has a layer, and a parameter that no layer has."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.gate, self.factor = nn.Linear(16, 16), nn.Parameter(torch.randn(16)), factor

    def forward(self, x: Tensor) -> Tensor:
        return Gate.apply(self.linear(x), self.gate, self.factor)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "places"), [(1.0, set()), (0.8, {"2.gate"})])
def test_a_parameter_that_no_layer_has_gets_its_derivative(factor: float, places: set[str]) -> None:
    seen, _ = trained(layer=Gated(factor))
    assert seen is not None
    assert {d.place for d in seen.defects} == places
    assert seen.not_examined == []


@pytest.mark.slow
def test_a_function_of_another_name_and_two_results_is_compared() -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        square, exponential = both(output, torch.float32)
        return (square.mean() + (exponential * y).mean()) / 2

    seen, _ = trained(loss=loss)
    assert seen is not None
    assert {d.cause for d in seen.defects} == {"loss"}
    assert seen.facts["own_backward"] == {"Both": pytest.approx(0.2, abs=0.15)}
    assert seen.not_examined == []


def test_a_loss_that_computes_no_float64_is_believed() -> None:
    seen, _ = trained(loss=lambda output, y: OfFloatsOnly.apply(output, y, 3.0, 2.0))
    assert seen is not None
    assert seen.verdict == "no defect"
    assert seen.not_examined == [
        "the loss of update 1, 2 (it depends on OfFloatsOnly, of which no function of torch was seen)"
    ]


def test_a_watch_leaves_functions_and_bits_as_they_are() -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        total: Tensor = SumOfSquares.apply(output, y, 3.0, 3.0)
        return total

    kinds = (Square, TenPercentLess, InTwoMethods, SumOfSquares)
    before = [dict(vars(kind)) for kind in kinds]
    _, watched = trained(TenPercentLess, loss)
    assert [dict(vars(kind)) for kind in kinds] == before
    _, alone = trained(TenPercentLess, loss, watch=False)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


@pytest.mark.slow
def test_a_compiled_loss_with_such_a_function_is_computed_as_without_a_watch() -> None:
    @torch.compile
    def loss(output: Tensor, y: Tensor) -> Tensor:
        total: Tensor = 2 * SumOfSquares.apply(output, y, 3.0, 3.0)
        return total

    seen, watched = trained(loss=loss)
    assert seen is not None
    assert seen.verdict == "no defect"
    torch._dynamo.reset()
    _, alone = trained(loss=loss, watch=False)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


class Tail(torch.autograd.Function):
    """Multiplies by the last weight and takes the loss, in one function, which returns fp32 (as Liger-Kernel's)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        logits = (x @ weight.to(x.dtype).T).float()
        rest = logits.softmax(-1) - F.one_hot(y, len(weight))
        ctx.save_for_backward(rest @ weight / len(y), rest.T @ x.float() / len(y))
        return F.cross_entropy(logits, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return *(grad * each for each in ctx.saved_tensors), None


def test_products_in_16_bits_are_rounded_within_a_function_that_returns_fp32() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(8, 16), nn.Parameter(torch.randn(20, 16) / 4)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return Tail.apply(self.first(x), self.weight, y)

    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(32, 8), torch.randint(20, (32,)))
        loss.backward()
        optimizer.step()
    assert seen.defects == [], str(seen)
    assert not seen.not_examined


class ProductInBf16(torch.autograd.Function):
    """Casts its operands, and the gradient that arrives, to 16 bits."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x, weight)
        return (x @ weight.T).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.bfloat16()
        return (grad @ weight).float(), ProductInBf16.factor * (grad.T @ x).float()


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_casts_of_a_backward_method_are_widened(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(8, 16), nn.Parameter(torch.randn(20, 16) / 4)

        def forward(self, x: Tensor) -> Any:
            return ProductInBf16.apply(self.first(x), self.weight)

    monkeypatch.setattr(ProductInBf16, "factor", factor)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(32, 8)), torch.randint(20, (32,)))
        loss.backward()
        optimizer.step()
    assert not seen.not_examined
    assert [defect.place for defect in seen.defects] == (["weight"] if factor != 1 else []), str(seen)


class SquaredInPlace(torch.autograd.Function):
    """Half a sum of squares, whose backward method writes the gradient over the argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum() / 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.data.mul_(grad)


@pytest.mark.parametrize("reads", [True, False])
def test_a_backward_method_that_writes_over_what_another_term_reads(reads):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpcompare.watch(model, optimizer, steps=1) as seen:
        out = model(torch.randn(8, 4))
        loss = out.square().sum() if reads else 0.0
        (loss + 2 * SquaredInPlace.apply(out)).backward()  # twice the output lies there for the square
        optimizer.step()
    assert [defect.cause for defect in seen.defects] == ["loss"] * reads
