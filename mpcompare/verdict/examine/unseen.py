"""Work of ours within a step or a replay, hidden from the modes that look at the operations of the network."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack, _pop_mode, _push_mode


class Unseen:
    """While it is entered, no mode sees what is computed: no function, and no operator. A mode of a watch may take
    longer than the work itself. Torch's own ``_disable_current_modes`` hides operators alone, and is slow."""

    def __enter__(self) -> "Unseen":
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._modes: list[TorchDispatchMode] = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
        return self

    def __exit__(self, *of_error: Any) -> None:
        for mode in reversed(self._modes):
            _push_mode(mode)
        self._functions.__exit__(*of_error)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """While it is entered, the modes see again what is computed."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()
