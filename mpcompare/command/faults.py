"""The faults of a run in one line: those that a user can mend, apart from those of this project."""

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from mpcompare.errors import BackendUnavailable, InputError


def known_fault(error: Exception) -> str | None:
    """Returns one line for what a user can change; None for a fault of this project, which deserves its traceback."""
    if isinstance(error, (InputError, BackendUnavailable, HydraException, OmegaConfBaseException)):
        return " ".join(str(error).split())
    if out_of_memory(error):
        return f"out of memory, try a smaller task.batch_size or task.model ({first_line(error)})"
    return None


def out_of_memory(error: BaseException) -> bool:
    """Returns whether torch, on a CPU or a GPU, or Python has run out of memory."""
    import torch  # here, for it takes seconds

    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def first_line(error: Exception) -> str:
    """Returns the error's class and the first line of its message."""
    return (f"{type(error).__name__}: {error}".splitlines())[0]
