"""Every command and every piece of Python in the README and in docs/ does what the pages say."""

import argparse
import importlib
import re
import sys
from itertools import pairwise

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from support.marks import slow_after
from support.pages import PAGES, ROOT, follow, parsed

from mpcompare.command.verbs import VERBS
from mpcompare.paths import CONF

FENCE = re.compile(r"^[ \t>]*(?:```|~~~)+[ \t]*(\S*)[ \t]*\n(.*?)^[ \t>]*(?:```|~~~)", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\s*(?:\$ |[A-Z_]+=\S+ )*(?:\S*/)?(?:python3?|pip|bash|source|scripts/\S+) ", re.MULTILINE)

FEW = [ROOT / "README.md"]


def name_of(page):
    return str(page.relative_to(ROOT))


of_each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.mark.slow
@of_each_page
def test_a_page_does_what_it_says(page, tmp_path):
    for command in follow(page, tmp_path, runs=True).commands:
        named = dict(word.lstrip("+").split("=", 1) for word in command if "=" in word)
        named |= {option: value for option, value in pairwise(command) if option == "--out"}
        for key in ("--out", "hydra.sweep.dir", "hydra.run.dir"):
            assert key not in named or (tmp_path / named[key]).exists(), command
        if "hydra.sweep.dir" in named:
            assert (tmp_path / named["hydra.sweep.dir"] / "report" / "index.html").exists(), command
    if page.name == "files.md":
        sweep = tmp_path / "multirun" / "files"
        promised = re.findall(r"^\| `(\S+\.\w+)` \|", page.read_text(), re.MULTILINE)
        assert "steps.csv" in promised
        assert [name for name in promised if not [*sweep.glob(name), *sweep.glob(f"*/{name}")]] == []


@pytest.mark.parametrize(
    "page", slow_after(len(FEW), [*FEW, *(page for page in PAGES if page not in FEW)]), ids=name_of
)
def test_every_command_of_a_page_is_one_that_its_program_takes(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for program, *arguments in follow(page, tmp_path, runs=False).commands:
        match arguments:
            case ["-m", "venv", *_] | ["install", *_]:
                pass
            case ["-m", "mpcompare", "plan", *given]:
                composes(given)
            case ["-m", "mpcompare", verb, *given] if verb in VERBS:
                takes("mpcompare.__main__", [verb, *given], monkeypatch)
            case ["-m", "mpcompare", *given]:
                composes(given)
            case ["-m", module, *given] if module.startswith("mpcompare."):
                takes(f"{module}.__main__", given, monkeypatch)
            case [script, *given] if (ROOT / script).is_file():
                takes(script.rpartition("/")[2].removesuffix(".py"), given, monkeypatch)
            case _:
                pytest.fail(f"{page.name}: no program of ours: {program} {' '.join(arguments)}")


def composes(given):
    """Composes the configurations of ``python -m mpcompare GIVEN``, so that every value is in one of them."""
    args = get_args_parser().parse_args(given)
    folder = [f"hydra.searchpath=[file://{args.config_dir}]"] if args.config_dir else []
    overrides = OverridesParser.create().parse_overrides(args.overrides)
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    seen = {None}  # a job that combines what others have had tells nothing new
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for job in jobs:
            plain = [each for each in job if "{hydra" not in each.replace("\\", "")]  # a job alone knows these values
            if not seen.issuperset(plain or [None]):
                cfg = compose("config", [*folder, *plain])
                OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            seen.update(plain)


class ParsedError(Exception):
    """A program has parsed its arguments."""


def takes(module, given, monkeypatch):
    """Lets the program in ``module`` parse its arguments, and do nothing else."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, *args):
        parse(parser, *args)
        raise ParsedError

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patched.setattr(sys, "argv", [module, *given])
        with pytest.raises(ParsedError):
            importlib.import_module(module).main()


@of_each_page
def test_no_command_is_left_out(page):
    """A block of commands that is neither run nor marked is one that the parser has not found, or is no ``sh``."""
    fences = FENCE.findall(page.read_text())
    found = [str(example.parsed) for example in parsed(page) if isinstance(example.parsed, str)]
    assert len(found) == sum(language in ("sh", "python") for language, _ in fences)
    hidden = [text for language, text in fences if language != "sh" and COMMAND.search(text)]
    assert hidden == []
    other = {language for language, _ in fences} - {"sh", "python", "toml", "yaml", ""}
    assert not other, f"expected sh, python, toml, yaml or none: {other}"


def test_a_command_that_fails_and_one_that_is_unknown_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- exits: 3 -->\n```sh\nexit 3\n```\n")
    follow(page, new(tmp_path, "a"), runs=True)
    page.write_text("Text.\n\n```sh\nexit 3\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, line 3: exit code 3"):
        follow(page, new(tmp_path, "b"), runs=True)
    page.write_text(
        '<!-- skip: next "needs a GPU" -->\n```sh\nexit 3\n```\n\n```sh\npython -m mpcompare backend=mine\n```\n'
    )
    followed = follow(page, new(tmp_path, "c"), runs=False)
    assert followed.skipped == ["needs a GPU"]
    assert followed.commands == [["python", "-m", "mpcompare", "backend=mine"]]
    with pytest.raises(Exception, match="Could not find 'backend/mine'"):
        composes(["backend=mine"])
    with pytest.raises(Exception, match="train.stesp"):
        composes(["train.stesp=3"])


def new(folder, name):
    (folder / name).mkdir()
    return folder / name
