"""The numbers on the pages are those of the files that are kept beside them."""

import docs_numbers
import pandas as pd
import pytest

LINES = 130  # of the README: a landing page


@pytest.mark.parametrize("page", docs_numbers.pages(), ids=lambda page: str(page.relative_to(docs_numbers.ROOT)))
def test_a_page_shows_what_the_kept_files_say(page):
    text = page.read_text()
    assert docs_numbers.written(text, docs_numbers.ROOT / "docs") == text, "run scripts/docs_numbers.py"
    assert text.count("<!-- numbers: ") == text.count("<!-- end -->")


def test_the_readme_is_short():
    assert len((docs_numbers.ROOT / "README.md").read_text().splitlines()) <= LINES


def test_a_number_that_changes_in_its_file_changes_on_the_page(tmp_path, monkeypatch, cli):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# A\n\n<!-- numbers: table a.csv -->\n<!-- end -->\nB\n")
    pd.DataFrame({"x": [1, 2]}).to_csv(tmp_path / "docs" / "a.csv", index=False)
    monkeypatch.setattr(docs_numbers, "ROOT", tmp_path)
    assert cli("--check", main=docs_numbers.main).code == 1
    assert cli(main=docs_numbers.main).out == "written: README.md\n"
    assert (tmp_path / "README.md").read_text() == (
        "# A\n\n<!-- numbers: table a.csv -->\n| x |\n|---|\n| 1 |\n| 2 |\n<!-- end -->\nB\n"
    )
    assert cli("--check", main=docs_numbers.main).code == 0
    (tmp_path / "docs" / "a.csv").unlink()
    with pytest.raises(SystemExit, match=r"README.md: .*No such file.*a.csv"):
        docs_numbers.main()
    (tmp_path / "README.md").write_text("<!-- numbers: guesses a.csv -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="README.md: numbers: guesses: expected one of output, runs"):
        docs_numbers.main()
