"""The figure of memory."""

import pytest
from support.records import MEASURED, write_run

from mpcompare.cost import TENSOR_KINDS
from mpcompare.report.comparison import compare
from mpcompare.report.contents import Report
from mpcompare.report.figures import memory as memory_figure
from mpcompare.report.runs import find_runs


@pytest.mark.slow
def test_the_memory_figure_stacks_the_model_and_what_was_measured_and_nothing_overlaps(tmp_path):
    write_run(tmp_path / "0", "mine", **MEASURED)
    write_run(tmp_path / "1", "amp", **{**MEASURED, "workspace_bytes": 0})
    write_run(tmp_path / "2", "old", peak_memory_bytes=20_000_000, peak_memory_bytes_analytic=None)  # no model
    write_run(tmp_path / "3", "gpu", **{**MEASURED, "device": "cuda"})
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    figure = memory_figure.memory(Report([comparison], "amp"))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in axes.containers}
    assert widths["inputs"] == [0.2]
    assert widths["activations"] == [1.7]
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([16.2, 16.2])  # 25 - 9 + 0.2, not on the GPU
    texts = [text.get_text() for text in axes.texts]
    assert texts[:3] == ["1.9 MB model", "2 MB (+5.3 %) + 14 MB", "16.2 MB resident"]
    assert len(texts) == 3 + 3 + 1 + 2
    assert texts[-1] == "2 MB (+5.3 %)"  # on a GPU the allocator's peak holds the workspace
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "inputs", "activations", memory_figure.ALLOCATED, memory_figure.OUTSIDE, memory_figure.RESIDENT,
    ]  # fmt: skip
    boxes = [text.get_window_extent() for text in axes.texts]
    bars = [bar.get_window_extent() for container in axes.containers for bar in container]
    for place, box in enumerate(boxes):
        assert axes.bbox.x0 < box.x0
        assert box.x1 < axes.bbox.x1
        assert not any(box.overlaps(other) for other in [*boxes[:place], *bars])
    box = legend.get_window_extent()
    assert (box.x0 > 0, box.x1 < figure.bbox.x1, box.y0 > 0, box.y1 < axes.get_tightbbox().y0) == (True,) * 4


def test_without_a_model_the_peak_is_stacked_by_operator(tmp_path):
    by_op = {f"aten::op{n}": 700_000 - 100_000 * n for n in range(7)}
    measured = {**MEASURED, "memory_model": {}, "peak_memory_bytes_analytic": None, "memory_by_op": by_op}
    write_run(tmp_path / "0", "amp", **{**measured, "peak_memory_bytes": 3_000_000})
    write_run(tmp_path / "1", "mine", **MEASURED)
    (comparison,) = compare(find_runs([tmp_path]), "amp")
    figure = memory_figure.memory(Report([comparison], "amp"))
    (axes,) = figure.axes
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in axes.containers}
    assert [widths[f"aten::op{n}"] for n in range(5)] == [pytest.approx([0.7 - 0.1 * n]) for n in range(5)]
    assert widths["other operators"] == pytest.approx([0.2 + 0.1])
    right = max(bar.get_x() + bar.get_width() for c in axes.containers for bar in c if bar.get_y() < -0.1)
    assert right == pytest.approx(3.0)  # all of the peak, the batch included
    assert [text.get_text() for text in axes.texts][:2] == ["by operator", "3 MB + 14 MB"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "inputs", "activations", *(f"aten::op{n}" for n in range(5)), "other operators", memory_figure.ALLOCATED,
        memory_figure.OUTSIDE, memory_figure.RESIDENT,
    ]  # fmt: skip


def test_the_figure_knows_the_kinds_of_the_model():
    assert tuple(memory_figure.KIND_COLOURS) == TENSOR_KINDS
    assert len(set(memory_figure.KIND_COLOURS.values())) == len(TENSOR_KINDS)
