"""A clean process: one in which no backend has been. It is made before a backend's module is imported. So nothing
changes there, whatever that module, or the backend, changes in torch for a whole process.

The clean process computes the values with which all entrants of a race are compared. On Linux it is a fork, which takes
milliseconds and shares its libraries; elsewhere it is a new process, which imports the libraries meanwhile.
"""

import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

from mpcompare.shared import save


class CleanProcessError(Exception):
    """The process could not do it; the message is the reason."""


class CleanProcess:
    """A clean process.

    It makes one thing, gives it to a function as the first argument, and saves what the function returns. It makes the
    thing anew for each function after the first: between two functions it holds no memory.
    """

    def __init__(
        self, make: Callable[..., Any], within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Starts the process, which waits. ``make`` makes the thing, and returns it with the answer to :meth:`make`. It
        is a function of a module, or a partial of one, as all functions here are. ``within`` is the context of each
        thing that the process does."""
        processes = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._pipe, far_end = processes.Pipe()
        arguments = (self._pipe, far_end, make, within)
        self._process = processes.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        far_end.close()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return self._process.pid

    def make(self, *arguments: Any) -> Any:
        """Lets it make the thing from these arguments; returns the answer. Raises CleanProcessError where it cannot."""
        return self._ask(None, None, arguments)

    def save(self, file: Path, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> None:
        """Lets it save ``function(thing, *arguments)``. Raises CleanProcessError where it cannot."""
        self._ask(file, function, arguments)

    def close(self) -> None:
        """Ends the process, whatever it does; a second time does nothing."""
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _ask(self, file: Path | None, function: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> Any:
        try:
            self._pipe.send_bytes(pickle.dumps((file, function, arguments)))
            done, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:  # it is gone
            self._process.join()
            raise CleanProcessError(f"its process ended with exit code {self._process.exitcode}") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CleanProcessError(f"it cannot be told what to do ({error})") from error
        if not done:
            raise CleanProcessError(answer)
        return answer


def _serve(
    near_end: connection.Connection,
    pipe: connection.Connection,
    make: Callable[..., Any],
    within: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Does what it is asked, until the other end of the pipe is closed, or its process is gone."""
    near_end.close()  # a fork has this end, too, and would wait for itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal goes to all processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    made_from: tuple[Any, ...] = ()
    made: list[Any] = []  # the thing, until the first function has it
    told: Any = None
    with suppress(EOFError, OSError):
        while True:
            file, function, arguments = pickle.loads(pipe.recv_bytes())
            try:
                with within():
                    if function is None:
                        *made, told = make(*arguments)
                        made_from = arguments
                    else:
                        save(function(made.pop() if made else _again(make, made_from, told), *arguments), file)
            except Exception as error:
                pipe.send_bytes(pickle.dumps((False, f"{type(error).__name__}: {' '.join(str(error).split())}")))
            else:
                pipe.send_bytes(pickle.dumps((True, told)))


def _again(make: Callable[..., Any], arguments: tuple[Any, ...], told: Any) -> Any:
    """Returns the thing, made once more. Its answer has to be ``told`` again."""
    thing, answer = make(*arguments)
    if answer != told:
        raise ValueError(f"it made another thing from the same arguments: {answer}, not {told}")
    return thing
