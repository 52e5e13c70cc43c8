"""The files by which people find, cite and join the project."""

import re

import pytest
import yaml

from mpcompare.paths import CONF

ROOT = CONF.parent


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert citation["version"] == version
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "mpcompare/py.typed").is_file()


def test_the_changelog_has_one_section_of_what_is_not_released():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.*)$", changelog, re.MULTILINE)[0] == "[Unreleased]"
    assert changelog.count("[Unreleased]") == 1


@pytest.mark.parametrize("name", ["bug_report", "accused", "new_backend"])
def test_a_template_asks_for_the_machine_and_the_report(name):
    text = (ROOT / f".github/ISSUE_TEMPLATE/{name}.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert {"name", "about"} <= set(yaml.safe_load(head))
    assert "`mpcompare env`" in body
    assert "`summary.md`" in body
