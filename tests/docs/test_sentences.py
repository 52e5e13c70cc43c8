"""Pages for people who are new here have short sentences, and a section for every cause."""

import re

import pytest
from support.causes_of import causes
from support.pages import ROOT

WORDS = 30  # of a sentence, at most
SHORT = ("docs/differs.md", "docs/reading.md", "CONTRIBUTING.md")  # pages whose sentences are counted
NO_PROSE = re.compile(r"<!--.*?-->|^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)\n]*\)")
CODE = re.compile(r"`[^`]+`")  # one word, whatever stands in it
BEGINS = re.compile(r"^(?:#+ |[-*] |\d+\. |\|)", re.MULTILINE)  # a heading, an item or a row is a paragraph


def sentences(text):
    """Returns the sentences of a page of Markdown, without code. A cell of a table is a paragraph, as an item is."""
    text = CODE.sub("code", LINK.sub(r"\1", NO_PROSE.sub("\n\n", text)))
    paragraphs = re.split(r"\n\s*\n|\|", BEGINS.sub("\n\n", text))
    flat = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return [each for paragraph in flat for each in re.split(r"(?<=[.?!:])\**\s+", paragraph) if each]


def too_long(text):
    return [each for each in sentences(text) if len(each.split()) > WORDS]


@pytest.mark.parametrize("page", SHORT)
def test_no_sentence_of_a_page_is_too_long(page):
    assert too_long((ROOT / page).read_text()) == []


def test_a_long_sentence_is_found_wherever_it_stands():
    long = " ".join(["word"] * 31)
    for text in (f"Short. {long}.", f"- item\n- {long}\n- item", f"| a | {long} |", f"# {long}", f"[{long}](a.md)"):
        assert too_long(text) == [next(each for each in sentences(text) if "word word" in each)], text
    short = " ".join(["word"] * 16)
    for text in (f"{short}.\n{short}.", f"- {short}\n- {short}", f"| {short} | {short} |", f"```\n{long}\n```"):
        assert too_long(text) == [], text


def test_every_cause_has_a_section_and_every_section_is_a_cause():
    sections = re.findall(r"^### (.+)$", (ROOT / "docs/differs.md").read_text(), re.MULTILINE)
    assert len(sections) == len(set(sections))
    assert set(sections) == causes()
    slugs = {section.replace(" ", "-") for section in sections}
    assert all(re.fullmatch(r"[a-z0-9-]+", slug) for slug in slugs)  # the anchor that GitHub makes of a heading


def test_every_section_has_a_mistake_and_says_how_to_confirm_and_to_mend_it():
    page = (ROOT / "docs/differs.md").read_text()
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        cause, text = section.split("\n", 1)
        (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        assert 1 <= len(code.splitlines()) <= 5, cause
        assert text.count("**Confirm**:") == text.count("**Mend**:") == 1, cause
