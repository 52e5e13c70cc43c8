"""The words of a verdict in the order of a summary, each with its sign and its colour."""

from enum import StrEnum


class Word(StrEnum):
    """A verdict in one to three words. A run without a verdict has a word, too."""

    sign: str  # a character, so that colour is not all that tells words apart
    kind: str  # the class of words that have a colour in common: ``same``, ``differs``, ``near`` or ``other``
    rank: int  # of a run in lists: 0 if it differs, 1 if it failed, 2 if nobody can vouch for it, 3 if somebody can

    DIFFERS = "differs", "✗", "differs", 0
    DID_NOT_FINISH = "did not finish", "!", "differs", 1
    CANNOT_BE_READ = "cannot be read", "!", "differs", 1
    NOT_COMPARABLE = "not comparable", "?", "other", 2
    DIFFERS_AS_DECLARED = "differs as declared", "≠", "other", 3
    NOT_SEEN = "not seen", "?", "near", 2
    SAME = "same", "✓", "same", 3
    WITHIN_NOISE = "within noise", "?", "other", 3
    REFERENCE = "reference", "=", "other", 3
    IN_DOUBT = "reference in doubt", "?", "near", 2
    NOT_EXAMINED = "not examined", "-", "other", 2

    def __new__(cls, word: str, sign: str, kind: str, rank: int) -> "Word":
        self = str.__new__(cls, word)
        self._value_, self.sign, self.kind, self.rank = word, sign, kind, rank
        return self

    @property
    def is_fine(self) -> bool:
        """Whether somebody can vouch for the run."""
        return self.rank == 3

    @property
    def place(self) -> int:
        """The place of the word in a summary."""
        return list(Word).index(self)
