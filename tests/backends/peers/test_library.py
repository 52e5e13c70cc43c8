"""Libraries that are missing."""

import re

import pytest

from mpcompare.backends.peers.library import library
from mpcompare.errors import BackendUnavailable


def test_a_missing_one_names_the_extra_that_installs_it():
    with pytest.raises(
        BackendUnavailable, match=re.escape("needs the package of no_such: pip install 'mpcompare[fabric]'")
    ):
        library("no_such", "fabric")
