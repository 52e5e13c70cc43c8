"""The formats in which functions take their operands where a module of 16 bits has fp32 numbers, too.

Autocast decides this function by function, and so does the mode here: it casts nothing but what a function is given.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from mpcompare.dtypes import HALF


def _named(owners: dict[Any, str]) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(owner, name) for owner, names in owners.items() for name in names.split())


# Functions that take operands of one dtype only.
PRODUCTS = _named(
    {
        F: "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "scaled_dot_product_attention multi_head_attention_forward prelu",
        torch: "matmul mm bmm mv dot vdot inner addmm addmv addbmm baddbmm einsum",
        Tensor: "matmul __matmul__ __rmatmul__ mm bmm mv dot vdot inner addmm addmv addbmm baddbmm",
        torch.linalg: "matmul multi_dot vecdot",
    }
)
# Functions that autocast computes in fp32. A loss is a mean over many rows, and a network chooses by distances. For
# spectra and functions of matrices torch has no kernels in 16 bits.
IN_FP32 = _named(
    {
        F: "cross_entropy nll_loss gaussian_nll_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits "
        "mse_loss l1_loss smooth_l1_loss huber_loss cosine_embedding_loss margin_ranking_loss",
        torch: "cdist stft quantile nanquantile cholesky inverse pinverse",
        Tensor: "stft quantile nanquantile cholesky inverse pinverse",
        torch.fft: "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn hfft ihfft",
        torch.linalg: "cholesky cond eigh eigvalsh inv lstsq matrix_rank pinv qr solve svd svdvals",
    }
)
# Functions that take rows of a table. Their backward adds up the gradients of each row, one by one.
LOOKUPS = _named({F: "embedding", torch: "embedding index_select gather", Tensor: "__getitem__ index_select gather"})


class ProductsIn(TorchFunctionMode):
    """While it is entered, a product of fp32 numbers and 16-bit numbers is a product of 16-bit numbers: numbers that an
    fp32 buffer has widened are rounded as they enter a product, as under autocast. ``IN_FP32`` take fp32 numbers. The
    gradients of rows of a parameter, such as a table of biases by position, are added up in fp32.

    The mode costs a look at each function of a call. A module that may do without it is called in it once, and later
    only if a function of the first call needed it. ``always`` says that each call needs it.
    """

    def __init__(self, dtype: torch.dtype, always: bool) -> None:
        super().__init__()
        self.dtype, self.always = dtype, always
        self.is_needed = True  # in the next call
        self._entered: list[bool] = []  # by call that is under way
        self._has_cast = False

    def put_on(self, module: nn.Module) -> None:
        """Enters the mode in each call of a module that needs it."""

        def enter(*_: object) -> None:  # a hook that returns something changes the inputs
            self._entered.append(self.is_needed)
            if self.is_needed:
                self.__enter__()

        def leave(_: nn.Module, args: object, output: object) -> None:
            if self._entered.pop():
                self.__exit__(None, None, None)
                self.is_needed = self.always or self._has_cast or output is None  # after an error nobody can tell

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Enters the mode for a backward, in which a checkpoint calls layers once more, if the calls need it."""
        if not self.is_needed:
            yield
            return
        with self:
            yield

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in PRODUCTS:
            tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor) and a.is_floating_point()]
            if len({t.dtype for t in tensors}) > 1:
                args, kwargs = self._given(args, kwargs, self.dtype)
        elif func in IN_FP32:
            args, kwargs = self._given(args, kwargs, torch.float32)
        elif func in LOOKUPS and _takes_rows(args):
            args, kwargs = self._given(args, kwargs, torch.float32)
            return func(*args, **kwargs).to(self.dtype)
        return func(*args, **kwargs)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        self._has_cast = True
        return tree_map(lambda a: in_dtype(a, dtype), (args, kwargs))


def _takes_rows(args: tuple[Any, ...]) -> bool:
    """Returns whether a lookup takes rows of a parameter of 16 bits by their numbers."""
    is_table = any(isinstance(a, nn.Parameter) and a.requires_grad and a.dtype in HALF for a in args)
    return is_table and any(isinstance(a, Tensor) and not a.is_floating_point() for a in tree_leaves(args))


def writes_into_first(func: Callable[..., Any]) -> bool:
    """Returns whether the name of a function says that it writes into its first argument, as ``copy_`` does. ``x += y``
    calls ``add_``."""
    name = str(getattr(func, "__name__", ""))
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def in_dtype(value: object, dtype: torch.dtype) -> object:
    """Returns a tensor of real numbers in a dtype, and any other value as it is."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
