"""Names of wrong updates."""

from support.judging import dataset_of, examined
from support.tasks import make_task

from mpcompare.backends.fp32 import Fp32
from mpcompare.report.verdicts import judge_run

TASK = make_task(samples=32 * 4)


class Halves(Fp32):
    """Takes half of each update, in a way that is no known mistake."""

    def step(self, lr):
        super().step(lr / 2)


def test_in_fp32_all_weights_have_the_digits_of_the_precision_and_no_master_weights_are_missed():
    fp32, run = (examined("run", backend, TASK, dataset_of(TASK), "fp32", steps=2) for backend in (Fp32, Halves))
    verdict = judge_run(run, fp32)
    assert (verdict.word, verdict.cause) == ("differs", "optimizer"), verdict.because
