"""The contract as a test: ``check_backend(MyBackend)`` in the tests of any package that has a backend.

A package of your own needs three things. A class as ``mpcompare/contract.py`` says; this in its ``pyproject.toml``,
which makes ``backend=my_amp`` known to ``python -m mpcompare``:

    [project.entry-points."mpcompare.backends"]
    my_amp = "my_amp.backend:MyAmp"

and this in its tests:

    from mpcompare.testing import check_backend
    from my_amp.backend import MyAmp

    def test_contract():
        check_backend(MyAmp)

The checks run on small networks: an MLP, the same with micro-batches and clipping, a CNN with batch norm, a
transformer. Checks of the interface come first. Where all of them hold, the backend is trained and examined as in a
race, and is compared with torch's own implementation in the same precision.

Two training loops are compared by ``assert_same_training(ours, reference)``, which knows no contract.
"""

from mpcompare.testing.candidate import BrokenContract, Candidate, Checked
from mpcompare.testing.check import check_backend, small_tasks
from mpcompare.testing.examined import examined_run
from mpcompare.testing.same_training import DifferentTraining, assert_same_training

__all__ = [
    "BrokenContract", "Candidate", "Checked", "DifferentTraining", "assert_same_training", "check_backend",
    "examined_run", "small_tasks",
]  # fmt: skip
