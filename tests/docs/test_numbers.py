"""The numbers on the pages come from the files that are kept next to them."""

import docs_numbers
import pandas as pd
import pytest

LINES = 130  # lines of the README: a landing page


@pytest.mark.parametrize("page", docs_numbers.pages(), ids=lambda page: str(page.relative_to(docs_numbers.ROOT)))
def test_a_page_shows_what_the_kept_files_say(page):
    text = page.read_text()
    assert docs_numbers.written(text, docs_numbers.ROOT / "docs") == text, "run scripts/docs_numbers.py"
    assert text.count("<!-- numbers: ") == text.count("<!-- end -->")


@pytest.mark.parametrize("page", docs_numbers.pages(), ids=lambda page: str(page.relative_to(docs_numbers.ROOT)))
def test_no_number_that_looks_measured_stands_in_prose(page):
    assert docs_numbers.measured(page.read_text()) == []


def test_numbers_that_look_measured_are_told_from_limits_and_code():
    prose = "A: 28 of 33 are flagged.\n\n97.6 % is 0\nin 0.5 ms and 10 MB, 3% of `5 %`.\n"
    places = "<!-- numbers: table a.csv -->\n5 %\n<!-- end -->\n```\n3 ms\n```\n![5 %](a_5%.png)\n"
    fine = (
        "A 95 % interval, 2 times u, 2^-24 of the weights, 4 standard deviations, 1 in 1000, 784-64-10, torch 2.15.\n"
    )
    found = ["line 1: 28 of 3", "line 3: 97.6 %", "line 4: 0.5 ms", "line 4: 10 MB", "line 4: 3%"]
    assert docs_numbers.measured(prose + places + fine) == [*found, "line 11: 5 %"]


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
    (tmp_path / "docs" / "b.md").write_text("It takes 5 ms.\n")
    assert "b.md, line 1: 5 ms: measured?" in cli("--check", main=docs_numbers.main).out
    (tmp_path / "docs" / "b.md").unlink()
    (tmp_path / "docs" / "a.csv").unlink()
    with pytest.raises(SystemExit, match=r"README.md: .*No such file.*a.csv"):
        docs_numbers.main()
    (tmp_path / "README.md").write_text("<!-- numbers: guesses a.csv -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="README.md: numbers: guesses: expected one of output, "):
        docs_numbers.main()
