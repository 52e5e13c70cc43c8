"""The structure of the code: no circle of imports, and functions that fit on a screen."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
LINES, PARAMETERS = 60, 7
# Functions with more parameters, and the reason.
MANY = {
    # The arguments of one call: a network, its data, loss, optimizer and their values.
    "mpcompare/api/compare.py": {"compare"},
    # An argument for each of gemm's schema in csrc/ops.cpp, named as there, and the product.
    "mpcompare/native/ops.py": {"torch_gemm"},
    # The arguments of all backends, and an option for each technique that can be taken away.
    "mpcompare/backends/scratch.py": {"__init__"},
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
FILES = sorted(path for folder in ("mpcompare", "scripts", "hydra_plugins") for path in (ROOT / folder).rglob("*.py"))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function))


def parameters(function: Function) -> int:
    """Returns the number of parameters, without ``self`` and ``cls``."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if a]
    return len([name for name in names if name not in ("self", "cls")])


def test_functions_are_short_and_take_few_parameters():
    found = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for function in functions(path):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > LINES:
                found.append(f"{name}: {function.name} has {lines} lines")
            if parameters(function) > PARAMETERS and function.name not in MANY.get(name, set()):
                found.append(f"{name}: {function.name} takes too many")
    assert found == []


def test_excuses_are_used():
    for path, names in MANY.items():
        many = {f.name for f in functions(ROOT / path) if parameters(f) > PARAMETERS}
        assert many == names, path


def test_no_module_imports_itself_by_way_of_others():
    graph = grimp.build_graph("mpcompare")
    # For the type checker alone: the findings are of all checks, and a check may look at all of them.
    graph.remove_import(importer="mpcompare.verdict.judge.check", imported="mpcompare.verdict.findings")
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            assert not graph.chain_exists(importer=imported, imported=module), f"{module} and {imported} form a circle"


def test_no_two_classes_of_the_package_have_one_name():
    places = defaultdict(list)
    for path in (ROOT / "mpcompare").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
