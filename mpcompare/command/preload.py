"""Imports everything that an entrant needs, in a process that does nothing else. Entrants are forks of this process.

torch takes seconds to import and hundreds of megabytes; forks share both. Nothing has happened by then that a fork must
not inherit: no thread was started, nothing was computed and CUDA was not called.
"""

import gc
import os

# A module that asks torch for a GPU while it is imported asks the driver's NVML, not CUDA.
FOR_NOW = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR",)  # a record would name it among what the user has set
_before = {name: os.environ.get(name) for name in (*FOR_NOW, *SET_BY_TORCH)}
os.environ.update(FOR_NOW)

import torch._dynamo  # noqa: E402, F401 - torch's optimizers import it in their first step

import mpcompare.command.callbacks  # noqa: E402
import mpcompare.command.launcher  # noqa: E402
import mpcompare.entrant.entrant  # noqa: E402, F401

for _name, _value in _before.items():
    if _value is None:
        os.environ.pop(_name, None)
    else:
        os.environ[_name] = _value

gc.collect()
gc.freeze()  # a garbage collector that walks all these objects would write to them, and their pages were shared no more
