"""The native operators, built before a test needs them."""

import pytest

from mpcompare.native import ops


@pytest.fixture
def built(request):
    """Loads the native operators for the device that the test runs on."""
    ops.load("cpu")
    if "device" in request.fixturenames:
        ops.load(request.getfixturevalue("device").type)
