"""The reasons why the layers of a sum of gradients cannot be replayed. A reason is about some calls of the network, and
lasts as long as they do."""


class Reasons:
    """The reasons that were found, in their order."""

    def __init__(self) -> None:
        self._found: list[tuple[str, int]] = []  # each with the number of calls of the network when it was found
        self._old = 0  # how many of the reasons were found before the last backward or step came to its end

    def add(self, why: str, count: int) -> None:
        """Is told of a reason.

        Args:
            count: how often the network was called until now.
        """
        if (why, count) not in self._found:
            self._found.append((why, count))

    @property
    def first(self) -> str:
        """The first reason; empty where there is none."""
        return next((why for why, _ in self._found), "")

    def age(self) -> None:
        """Is told that a backward, or a step, has come to its end. A later reason may be about the next one."""
        self._old = len(self._found)

    def drop(self, first: int) -> None:
        """Drops the old reasons that are about calls of the network before the call with this number."""
        old = [(why, count) for why, count in self._found[: self._old] if count >= first]
        self._found, self._old = old + self._found[self._old :], len(old)
