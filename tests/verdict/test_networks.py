"""Networks that nobody here wrote: no correct backend is accused on them. docs/your_network.md has them as a table."""

import pytest
from support.foreign import NETWORKS
from support.judged_networks import judged

CASES = [pytest.param(n, p, id=f"{n.name} {p}") for n in NETWORKS for p in (*n.precisions, "fp32")]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "precision"), CASES)
def test_no_correct_backend_is_accused_on_a_network_of_others(network, precision):
    if network.library in ("timm", "transformers"):
        pytest.importorskip(network.library, reason=f"needs {network.library}: pip install '.[networks]'")
    verdicts = dict(judged(network, precision, compiled=False))
    assert len(verdicts) == 2
    for name, verdict in verdicts.items():
        assert verdict.word in ("same", "reference"), f"{name}: {verdict}: {verdict.because}"
