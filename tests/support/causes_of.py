"""The causes that the judge can give, read from its source: no run shows them all."""

import ast
from collections.abc import Iterator

from mpcompare.paths import CONF
from mpcompare.verdict.judge import dtypes, lent, masks

JUDGE, EXAMINE = (CONF.parent / "mpcompare/verdict" / name for name in ("judge", "examine"))
PAIRS = {"Explanation", "Explanation | None", "tuple[str, str]"}  # a cause and its sentence
NAMING = {"cause_of", "role", "_of_output"}  # functions that return a cause alone
NO_CAUSES = {"verdict.py"}  # it says what was not seen, in pairs of the same type


def causes() -> set[str]:
    """Returns every cause that a check of the judge may have."""
    found = set(dtypes.TECHNIQUES.values()) | {masks.CAUSE}
    found |= {f"{name} written" for name in lent.BECAUSE}
    for file in [*sorted(JUDGE.glob("*.py")), *sorted(EXAMINE.glob("*mistakes.py"))]:
        if file.name not in NO_CAUSES:
            found |= set(_of_source(ast.parse(file.read_text())))
    return found - {""}


def _of_source(tree: ast.Module) -> Iterator[str]:
    named = _assigned(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _of_function(node, named | _assigned(list(ast.walk(node))))


def _of_function(function: ast.FunctionDef, named: dict[str, ast.expr]) -> Iterator[str]:
    returns = ast.unparse(function.returns) if function.returns else ""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Check":
            yield from _strings(node.args[3], named)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Known":
            yield from _strings(node.args[0], named)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("of_drives", "gradient_checks")):
            yield from _strings(node.args[-1], named)
        elif isinstance(node, ast.Return) and node.value and function.name in NAMING:
            yield from _strings(node.value, named)
        elif isinstance(node, ast.Return) and node.value and returns in PAIRS:
            for pair in ast.walk(node.value):
                if isinstance(pair, ast.Tuple) and len(pair.elts) == 2:
                    yield from _strings(pair.elts[0], named)


def _assigned(nodes: list[ast.AST] | list[ast.stmt]) -> dict[str, ast.expr]:
    """Returns what is assigned to a name, where it is one expression."""
    return {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _strings(expression: ast.expr, named: dict[str, ast.expr]) -> Iterator[str]:
    """Yields the strings that an expression may be, as far as they stand in the source."""
    match expression:
        case ast.Constant(value=str(text)):
            yield text
        case ast.BoolOp(values=several):
            for each in several:
                yield from _strings(each, named)
        case ast.IfExp(body=one, orelse=other):
            yield from _strings(one, named)
            yield from _strings(other, named)
        case ast.Name(id=name) if name in named:
            yield from _strings(named[name], {})
