"""Findings are written and read back whole."""

import json
import math
from dataclasses import replace

import pytest
from support.backends import BACKENDS
from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.records import finite, numbers
from mpcompare.tasks.optimizers import AdamW
from mpcompare.verdict.findings import from_document, to_document
from mpcompare.verdict.judge.errors import GradientError, relative_error


@pytest.mark.parametrize(
    ("name", "precision"), [("amp", "fp16"), pytest.param("fused", "bf16", marks=pytest.mark.slow)]
)
def test_findings_are_read_back_as_they_were_written(name, precision):
    task = replace(make_task(), optimizer=AdamW(1e-3), accumulate=2, clip_norm=0.1)
    findings = examined(name, BACKENDS[name], task, dataset_of(task), precision, steps=2, noise=1).findings
    document = json.loads(json.dumps(finite(to_document(findings))))
    assert from_document(numbers(document)) == findings
    assert document["again"]["seen"][0] == "loss"  # what a check's own pass found stands among all else
    assert from_document(numbers({**document, "dtypes": {}})) == findings  # this check has no pass
    assert findings.precision == precision
    assert (findings.recipe.accumulate, findings.recipe.clip_norm, findings.recipe.linear) == (2, 0.1, False)
    assert [run.change for run in findings.noise] != []
    assert findings.first.finite.micro_batches.counts == pytest.approx([1, 1], abs=0.05)


@pytest.mark.parametrize("document", [{}, {"recipe": {}}, {"recipe": {"batch_size": 1}, "precision": "fp16"}])
def test_what_is_no_document_raises(document):
    with pytest.raises((ValueError, TypeError, KeyError)):
        from_document(document)


def test_a_relative_error_is_infinite_where_nothing_is_right():
    error = GradientError(error=1.0, norm=2.0, largest=1.0, slope=1.0, residual=0.0, zeros=0.0, elements=1)
    assert relative_error(error) == 0.5
    assert relative_error(None) == math.inf
    nothing = GradientError(error=0.0, norm=0.0, largest=0.0, slope=1.0, residual=0.0, zeros=0.0, elements=0)
    assert relative_error(nothing) == 0.0
    assert relative_error(GradientError(**{**vars(nothing), "error": 1e-9})) == math.inf
    assert relative_error(GradientError(**{**vars(error), "error": math.nan})) == math.inf
