"""The lists of what can be chosen."""

import pytest

from mpcompare.command.listing import comment_of, docstring_of, lines_of
from mpcompare.command.verbs import LISTS
from mpcompare.paths import CONF


@pytest.mark.parametrize(("verb", "group"), LISTS.items())
def test_every_file_of_a_group_has_one_line(cli, verb, group):
    ended = cli(verb)
    assert ended.code == 0, ended.err
    lines = dict(line.split(maxsplit=1) for line in ended.out.splitlines())
    names = {path.relative_to(CONF / group).with_suffix("").as_posix() for path in (CONF / group).rglob("*.yaml")}
    assert set(lines) == names
    assert all(line.strip().endswith((".", "KEY=VALUE.")) for line in lines.values())
    assert not any("python -m" in line or "@package" in line for line in lines.values())


def test_what_a_folder_and_a_package_add_is_listed_by_its_docstring(cli, tmp_path, monkeypatch):
    """The class is read, not imported: importing this one would raise."""
    (tmp_path / "its_net").mkdir()
    (tmp_path / "its_net" / "__init__.py").write_text("raise SystemError('imported')\n")
    (tmp_path / "its_net" / "amp.py").write_text('class Mine:\n    """Theirs.\n\n    More."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    group = tmp_path / "conf" / "backend"
    group.mkdir(parents=True)
    (group / "mine.yaml").write_text("_target_: its_net.amp.Mine\n")
    (group / "amp.yaml").write_text("# In place of ours.\n_target_: its_net.amp.Mine\n")
    (group / "silent.yaml").write_text("_target_: nobody.Nothing\n")
    ended = cli("backends", "--config-dir", str(tmp_path / "conf"))
    assert ended.code == 0, ended.err
    lines = {line.split()[0]: line.split()[1:] for line in ended.out.splitlines()}
    assert lines["mine"] == ["Theirs."]
    assert lines["amp"] == ["In", "place", "of", "ours."]
    assert lines["silent"] == []


def test_what_search_path_plug_ins_add_is_listed(cli, tmp_path, monkeypatch):
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    (tmp_path / "its" / "task").mkdir(parents=True)
    (tmp_path / "its" / "task" / "theirs.yaml").write_text("# Their task.\n")

    class Its(SearchPathPlugin):
        def manipulate_search_path(self, search_path):
            search_path.append("its", f"file://{tmp_path / 'its'}")

    monkeypatch.setitem(
        Plugins.instance().plugin_type_to_subclass_list, SearchPathPlugin,
        [*Plugins.instance().discover(SearchPathPlugin), Its],
    )  # fmt: skip
    assert ["theirs", "Their", "task."] in [line.split() for line in cli("tasks").out.splitlines()]


def test_a_folder_that_is_not_there_is_one_line(cli):
    ended = cli("tasks", "--config-dir", "nowhere")
    assert (ended.code, ended.err) == (2, "mpcompare: error: --config-dir=nowhere: there is no such folder\n")


def test_a_line_has_whole_sentences_and_no_more_than_fit():
    assert comment_of("# @package _global_\n#\n# python -m mpcompare\n#\n# One,\n# two. Three.\n#\n# Four.\n") == (
        "One, two. Three."
    )
    assert comment_of(f"# Short. {'long ' * 30}.\na: 1\n") == "Short."
    assert comment_of("a: 1\n# late\n") == ""
    assert docstring_of("mpcompare.backends.amp.Nobody") == docstring_of("") == docstring_of("sys.path") == ""
    assert lines_of("task", []) == {}
