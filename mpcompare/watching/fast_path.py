"""Layers that compute in another way while a mode is entered: torch's transformer layers have a fast path, in
evaluation and without gradients. A loop may have such a teacher, and the watch must change none of its bits."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

LAYERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class FastPath:
    """Leaves the modes of a look while such a layer is called that is none of the watched network's.

    Attributes:
        leave: leaves them, and returns whether it could.
        enter: enters them again.
    """

    def __init__(self, leave: Callable[[], bool], enter: Callable[[], None]) -> None:
        self.leave, self.enter = leave, enter
        self._calls = 0  # under way since the modes were left

    def attach(self, network: nn.Module) -> list[RemovableHandle]:
        """Puts hooks on all modules if there is such a layer, and returns them."""
        own = set(map(id, network.modules()))
        if not any(issubclass(type(each), LAYERS) and id(each) not in own for each in gc.get_objects()):
            return []
        return [
            register_module_forward_pre_hook(self._called),
            register_module_forward_hook(self._returned, always_call=True),
        ]

    def _called(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, LAYERS) and (self._calls or (not torch.is_grad_enabled() and self.leave())):
            self._calls += 1

    def _returned(self, module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(module, LAYERS) and self._calls:
            self._calls -= 1
            if not self._calls:
                self.enter()
