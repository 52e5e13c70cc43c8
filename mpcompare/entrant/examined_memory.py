"""The memory that an examination took: of the entrant's process, and of the one that computes its oracle."""

from collections.abc import Callable

from mpcompare.clean_process import CleanProcess
from mpcompare.instruments import meter


class ExaminedMemory:
    """Both processes, from before they had tensors on."""

    def __init__(self, clean: CleanProcess | None) -> None:
        self.pid = None if clean is None else clean.pid
        self.own, self.of_clean = meter.rss_bytes(), self._of_clean(meter.rss_bytes)
        self.rest: int | None = None

    def begin(self) -> int | None:
        """Is told that the examination begins. Returns the bytes that the own process holds then, beyond those before;
        None where that is not known."""
        self.rest = meter.rss_bytes() if meter.reset_peak_rss() else None
        return None if self.rest is None or self.own is None else max(self.rest - self.own, 0)

    def peak(self) -> int | None:
        """Returns the most bytes that both took together in the examination, beyond those before; None where that is
        not known. While the oracle is computed the entrant waits, and while it works the oracle's process does."""
        own = meter.peak_rss_bytes()
        if self.rest is None or self.own is None or own is None:
            return None
        now, peak = self._of_clean(meter.rss_bytes), self._of_clean(meter.peak_rss_bytes)
        if self.of_clean is None or now is None or peak is None:
            return max(own - self.own, 0)  # a process that gives memory back meanwhile may end with less
        return max(own + now - self.own - self.of_clean, self.rest + peak - self.own - self.of_clean, 0)

    def _of_clean(self, measure: Callable[[int | None], int | None]) -> int | None:
        return None if self.pid is None else measure(self.pid)
