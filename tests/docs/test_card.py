"""The card that docs/watch.md shows is what its example prints."""

import re
import runpy

from support.pages import ROOT

PAGE = ROOT / "docs" / "watch.md"
CARD = ROOT / "docs" / "watch" / "card.txt"


def test_the_example_prints_the_card(tmp_path, capsys):
    example = re.search(r"A whole example.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "loop.py").write_text(example[1])
    runpy.run_path(str(tmp_path / "loop.py"))
    assert _without_digits(capsys.readouterr().out) == _without_digits(CARD.read_text())


def _without_digits(text):
    """Returns a text without the digits of its numbers of several, which another CPU may round in another way."""
    return re.sub(r"\d*\.\d+(e-\d+)?", "0.0", text)
