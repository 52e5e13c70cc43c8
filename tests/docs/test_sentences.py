"""The pages have short sentences, and a section for every cause."""

import re

import pytest
from support.causes_of import causes
from support.pages import ROOT
from support.prose import sentences, too_long

from mpcompare.verdict.judge.kinds import KINDS

PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
KEPT = re.compile(r"<!-- numbers: (?!checks).*?<!-- end -->", re.DOTALL)  # made from files; the checks are prose


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_of_a_page_is_too_long(page):
    assert too_long(KEPT.sub("", (ROOT / page).read_text())) == []


def test_a_long_sentence_is_found_wherever_it_stands():
    long = " ".join(["word"] * 31)
    for text in (f"Short. {long}.", f"- item\n- {long}\n- item", f"| a | {long} |", f"# {long}", f"[{long}](a.md)"):
        assert too_long(text) == [next(each for each in sentences(text) if "word word" in each)], text
    short = " ".join(["word"] * 16)
    for text in (f"{short}.\n{short}.", f"- {short}\n- {short}", f"| {short} | {short} |", f"```\n{long}\n```"):
        assert too_long(text) == [], text


def test_no_cell_of_a_table_is_too_long():
    """A cell of more than 300 characters is a section that has no heading."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    cells = [(page, cell) for page in pages for line in page.read_text().splitlines() if line.startswith("|")
             for cell in line.split("|")]  # fmt: skip
    assert len(cells) > 1000
    assert [f"{page.name}: {cell.strip()[:60]}" for page, cell in cells if len(cell) > 300] == []


def test_every_kind_of_check_has_a_section_in_its_order():
    sections = re.findall(r"^## (.+)$", (ROOT / "docs/checks.md").read_text(), re.MULTILINE)
    assert sections[1:] == list(KINDS)


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
