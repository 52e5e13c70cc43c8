"""Parameters that move without a gradient are accused; those that rest are not."""

from types import SimpleNamespace

from mpcompare.verdict.judge.drive import Drive
from mpcompare.verdict.judge.idle import checks


def drive(*idle):
    return Drive(idle=list(idle))


def test_each_parameter_that_moves_without_a_gradient_is_accused():
    drives = {"first": drive({}, {"a": False, "b": True}), "overflow": drive()}
    aged = SimpleNamespace(drive=drive({"a": True}))
    findings = SimpleNamespace(drives=drives, aged=aged, trained=None)
    case = SimpleNamespace(run=SimpleNamespace(findings=findings))
    found = list(checks(case))
    assert [(check.name, check.passed) for check in found] == [
        ("update 2 of pass first without a gradient, a", True),
        ("update 2 of pass first without a gradient, b", False),
        ("update 1 of pass aged without a gradient, a", False),
    ]
    assert {check.cause for check in found} == {"unused parameter"}
    assert found[1].because.startswith("b has no gradient in this update, and moves all the same")
