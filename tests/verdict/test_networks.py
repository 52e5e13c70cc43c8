"""No correct backend is accused on networks that nobody here wrote. docs/networks_of_others.md has a table of them."""

import pytest
from support.drawn import DRAWN, TAKEN, by_hash
from support.forced_tables import forced_row
from support.foreign import BOTH, NETWORKS
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


@pytest.mark.parametrize("library", TAKEN)
def test_names_are_drawn_by_their_hashes(library):
    assert [*TAKEN[library].split()] == by_hash(TAKEN[library].split())


@pytest.mark.slow
@pytest.mark.parametrize("network", DRAWN, ids=lambda network: network.name)
@pytest.mark.parametrize("precision", BOTH)
def test_no_correct_backend_is_accused_beside_the_forced_replay_of_a_drawn_network(network, precision):
    pytest.importorskip(network.library, reason=f"needs {network.library}: pip install '.[networks]'")
    row = forced_row(network, precision)
    assert not row["accused"]
    assert int(row["seen"]) >= 0.8 * (int(row["parameters"]) - int(row["unused"]))
