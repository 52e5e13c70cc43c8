"""Loops that are right have no defect under the watch, and train to the same bits."""

import pytest

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[loops]'")
pytest.importorskip("lightning", reason="needs lightning: pip install '.[loops]'")
pytest.importorskip("timm", reason="needs timm: pip install '.[loops]'")
pytest.importorskip("transformers", reason="needs transformers: pip install '.[loops]'")

from watch.bugs.controls import CONTROLS
from watch.judge import BITS_AFTER, changed_bits, judged
from watch.loops.base import Loop
from watch.loops.every import LOOPS
from watch.random_loops import RandomLoop

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CASES = [(loop, precision) for loop in LOOPS for precision in loop.precisions]
IDS = [f"{loop.name}, {precision}" for loop, precision in CASES]


@pytest.mark.parametrize(("loop", "precision"), CASES, ids=IDS)
def test_a_loop_of_others_has_no_defect(loop: type[Loop], precision: str) -> None:
    result = judged(loop(precision), loop.meant(precision))
    assert (result.causes, result.sentences) == ([], []), result.text
    assert result.verdict != "error"
    assert bool(result.expected) == (loop.computes is not None), result.expected  # refused if it computes in fp32


@pytest.mark.parametrize(("loop", "precision"), CASES, ids=IDS)
def test_the_watch_changes_no_bit(loop: type[Loop], precision: str) -> None:
    assert changed_bits(lambda: loop(precision), BITS_AFTER) == 0


@pytest.mark.parametrize(("loop", "precision", "after"), CONTROLS, ids=[loop.__name__ for loop, _, _ in CONTROLS])
def test_the_form_of_a_bug_is_no_defect(loop: type[Loop], precision: str, after: int) -> None:
    result = judged(loop(precision), {}, after)
    assert (result.causes, result.sentences) == ([], []), result.text
    assert result.verdict != "error"


@pytest.mark.parametrize("number", range(10))
def test_a_random_loop_has_no_defect(number: int) -> None:
    loop = RandomLoop(number)
    result = judged(loop, {})
    assert set(result.causes) <= ({"no master weights"} if loop.is_short else set()), result.text
    assert changed_bits(lambda: RandomLoop(number), 6) == 0
