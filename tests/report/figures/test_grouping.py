"""The rows of figures that show large networks."""

from mpcompare.report.figures import grouping


def test_names_are_grouped_by_the_first_key_that_makes_few_enough_groups():
    names = [f"blocks.{block}.{layer}.weight" for block in range(3) for layer in ("0", "1")]
    keys = (str, grouping.without_first_number, grouping.without_block_numbers)
    assert grouping.groups_of(names, keys, 6) == [[name] for name in names]
    assert grouping.groups_of(names, keys, 5) == [names[::2], names[1::2]]
    assert grouping.groups_of(names, keys, 1) == [names]
    assert grouping.groups_of([*names, "head"], keys, 1) == [names, ["head"]]  # the last key, though it makes too many


def test_a_span_names_the_first_and_the_last():
    assert grouping.span(["head.weight"]) == "head.weight"
    assert grouping.span(["blocks.0.up", "blocks.3.up", "blocks.11.up"]) == "blocks.0..11.up"
    assert grouping.span(["layer1.0.conv1", "layer4.2.conv1"]) == "layer1..4.0..2.conv1"
    assert grouping.span(["stem", "head"]) == ""


def test_numbers_within_a_word_and_at_the_end_are_none_of_a_block():
    assert grouping.without_block_numbers("layer1.0.conv2.1") == "layer1.#.conv2.1"
    assert grouping.without_numbers("layer1.0.conv2.1") == "layer#.#.conv#.#"
