"""An update in the middle of training is judged as other updates are, and the verdict names the rate."""

from types import SimpleNamespace

from mpcompare.promises import Promises
from mpcompare.verdict.judge.drive import Drive, KnownMistake, Step, UpdateError
from mpcompare.verdict.judge.midway import checks

ANOTHER_RATE = "at another learning rate than that of the schedule, right apart from that"
NO_DECAY = "without weight decay"


def drive(excess, **known):
    step = Step(True, False, False, True, 1.0, 1.0)
    error = UpdateError(excess, 1.02, 0.0, 0.0, 0.0, 0.0)
    return Drive([step], [{"a": error}], known_mistakes=known)


def found(midway):
    findings = SimpleNamespace(midway=midway, precision="bf16", promises=Promises())
    return list(checks(SimpleNamespace(run=SimpleNamespace(findings=findings))))


def test_an_update_within_its_roundings_passes():
    assert [(check.name, check.passed) for check in found(drive(0.9))] == [
        ("update 1 of pass midway, a", True),
        ("weights in step 1 of pass midway", True),
    ]


def test_another_rate_is_a_wrong_schedule():
    known = {NO_DECAY: KnownMistake("weight decay", 20.0), ANOTHER_RATE: KnownMistake("schedule", 0.9)}
    failed = [check for check in found(drive(30.0, **known)) if not check.passed]
    assert [check.cause for check in failed] == ["schedule"]
    assert failed[0].because.endswith(ANOTHER_RATE)


def test_a_mistake_with_a_name_of_its_own_is_named_first():
    known = {NO_DECAY: KnownMistake("weight decay", 0.8), ANOTHER_RATE: KnownMistake("schedule", 0.9)}
    assert found(drive(30.0, **known))[0].cause == "weight decay"
    assert found(drive(30.0, **{ANOTHER_RATE: KnownMistake("schedule", 9.0)}))[0].cause == "optimizer"


def test_without_that_update_nothing_is_said():
    assert found(None) == []
