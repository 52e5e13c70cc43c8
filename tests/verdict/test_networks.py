"""Networks that nobody here wrote: no correct backend is accused on them. docs/your_network.md has a table of them."""

import pytest
import torch
from support.drawn import DRAWN, TAKEN, by_hash
from support.forced_tables import forced_row
from support.foreign import BOTH, NETWORKS
from support.judged_networks import judged

from mpcompare.verdict.examine.forced.roundings import convolves_in

# Without kernels for bf16 torch sums convolutions in 16 bits on a CPU. Roundings are then so large that an error of a
# tenth may hide in the gradients of resnet18, and the verdict says so.
SUMS_IN_16_BITS = convolves_in(torch.bfloat16, torch.device("cpu")) is not torch.float32
CASES = [pytest.param(n, p, id=f"{n.name} {p}") for n in NETWORKS for p in (*n.precisions, "fp32")]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "precision"), CASES)
def test_no_correct_backend_is_accused_on_a_network_of_others(network, precision):
    if network.library in ("timm", "transformers"):
        pytest.importorskip(network.library, reason=f"needs {network.library}: pip install '.[networks]'")
    verdicts = dict(judged(network, precision, compiled=False))
    assert len(verdicts) == 2
    blind = ("not seen",) if SUMS_IN_16_BITS and (network.name, precision) == ("resnet18", "bf16") else ()
    for name, verdict in verdicts.items():
        assert verdict.word in ("same", "reference", *blind), f"{name}: {verdict}: {verdict.because}"


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
