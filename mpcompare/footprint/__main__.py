"""``python -m mpcompare.footprint NAME``: the bytes of a training step by kind, in each recipe. No step is computed."""

import argparse
import logging
import warnings
from pathlib import Path

from mpcompare.errors import InputError, check_whole, fail, fails_on_input_errors
from mpcompare.interrupt import ends_when_interrupted
from mpcompare.report.formats import check_figure, save_figure
from mpcompare.streams import lasting


@lasting()
@ends_when_interrupted()
@fails_on_input_errors()
def main() -> None:
    args = _parser().parse_args()
    # torch takes seconds to import: --help stays quick
    from mpcompare.footprint.count import Footprint, survey
    from mpcompare.footprint.fake import MeasuredKernels
    from mpcompare.footprint.shown import draw, show
    from mpcompare.footprint.subject import Wish, subject_of

    warnings.filterwarnings("ignore", message=".*FakeTensor.*")
    # A shape that does not fit is said in one line below.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL + 1)
    if args.out is not None:
        check_figure(args.out)
    for option, value in (("--batch", args.batch), ("--length", args.length)):
        if value is not None:
            check_whole(option, value, at_least=1)
    wish = Wish(args.name, args.arguments, args.batch, args.length, _shape(args.shape), args.optimizer)
    subject = subject_of(wish)
    kernels = subject.is_task if args.kernels is None else args.kernels
    footprints = survey(subject, MeasuredKernels() if kernels else None)
    show(subject.title, footprints, kernels)
    if not any(isinstance(f, Footprint) for f in footprints.values()):
        fail(f"NAME={args.name}: no recipe could take a step")
    if args.out is not None:
        save_figure(draw(subject.title, footprints), args.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpcompare.footprint",
        description="The bytes of a training step by kind, in each recipe: fp32, amp, master weights, plain bf16, "
        "8-bit moments, and int8 weights for inference. Steps are taken on tensors without data.",
    )
    parser.add_argument("name", metavar="NAME", help="gpt2, gpt2-medium, -large, -xl, a task, or my_package.Net")
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE", help="arguments of the model")
    parser.add_argument("--batch", type=int, help="samples of a batch (default: the task's; 8 for gpt2)")
    parser.add_argument("--length", type=int, help="ids of a sample (default: the task's; 1024 for gpt2)")
    parser.add_argument("--shape", help="shape of a sample of real numbers, as 3,224,224: for my_package.Net")
    parser.add_argument("--optimizer", help="a word of conf/optimizer (default: the task's; adamw for gpt2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figure: a .png, .svg or .pdf")
    parser.add_argument(
        "--kernels",
        action=argparse.BooleanOptionalAction,
        help="also measure what each kernel holds while it runs on this CPU: calls each once, on zeros "
        "(default: for tasks only, because large networks take long)",
    )
    return parser


def _shape(text: str | None) -> tuple[int, ...] | None:
    """Returns the shape in ``text``, whole numbers with commas between them."""
    if text is None:
        return None
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise InputError("--shape", text, "expected whole numbers of at least 1, as 3,224,224")
    return shape


if __name__ == "__main__":
    main()
