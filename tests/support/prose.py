"""The sentences of a text, and the sentences that are too long for people who are new here."""

import re

WORDS = 30  # words of a sentence, at most
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
