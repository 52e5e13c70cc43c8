"""The wrong inputs of the command line, each with the line that it must print. ``wrong_inputs.py`` tries them all."""

from collections.abc import Iterator
from dataclasses import dataclass

import wrong_user as user


@dataclass(frozen=True)
class Wrong:
    """A wrong input: overrides for a command that works without them, and the beginning of the line of its error."""

    overrides: tuple[str, ...]
    said: str


WHOLE = {"train.steps": 1, "train.warmup_steps": 0, "task.batch_size": 1, "task.accumulate": 1, "verdict.noise": 0,
         "seed": 0}  # fmt: skip
NUMBERS = {"measure.rel_ci": 0, "measure.budget_s": 0, "measure.block_s": 0, "inference.budget_s": 0,
           "task.optimizer.lr": 0, "task.clip_norm": 0}  # fmt: skip
FLAGS = ("train.deterministic", "train.not_finite", "verdict.enabled", "inference.enabled", "report.strict",
         "resume_older")  # fmt: skip
EVERY = ("eval.every", "monitor.every", "inference.batch_size")
# By a group's option its numbers, each of which refuses all these values, in a line that names it.
OPTIONS = {
    "loss_scale=static": ("loss_scale.init_scale",),
    "loss_scale=dynamic": ("loss_scale.init_scale", "loss_scale.growth_factor", "loss_scale.backoff_factor",
                           "loss_scale.growth_interval", "loss_scale.hysteresis"),
    "schedule=cosine": ("task.schedule.warmup_steps", "task.schedule.min_factor"),
    "schedule=warmup": ("task.schedule.steps",),
    "optimizer=adam": ("task.optimizer.lr", "task.optimizer.eps", "task.optimizer.weight_decay",
                       "task.optimizer.betas"),
}  # fmt: skip
NO_NUMBERS = ("-1", "nan", "word", "true", "[]", "null", "[1,2,3]")
CHOICES = {"precision": "auto, fp32", "engine": "auto, native", "device": "auto, cpu"}
GROUPS = ("backend", "task", "data", "optimizer", "schedule", "loss_scale")
SECTIONS = ("train", "eval", "monitor", "measure", "inference", "verdict", "report")
TAKEN = ("train", "eval", "monitor", "measure", "inference", "verdict")  # sections whose keys are all known
SHOWN = {"null": "None", "true": "True", "[]": "[]", "''": ""}  # as Python writes them


def every() -> Iterator[Wrong]:
    """Yields all wrong inputs."""
    yield from _values()
    yield from _names()
    yield from _own()


def _values() -> Iterator[Wrong]:
    for key, least in WHOLE.items():
        for value in (str(least - 1), "1.5", "many", "null", "true", "[]", "nan"):
            yield _of(key, value, f"expected a whole number of at least {least}")
    for key, above in NUMBERS.items():
        for value in ("0", "-1", "nan", "word", "true", "[]"):
            yield _of(key, value, f"expected a finite number above {above}")
    for key in FLAGS:
        for value in ("perhaps", "1", "null", "[]"):
            yield _of(key, value, "expected true or false")
    for key in EVERY:
        for value in ("0", "-1", "1.5", "word", "true"):
            yield _of(key, value, "expected a whole number of at least 1, or null")
    for value in ("0", "-1", "1.5", "word", "true"):
        yield _of("train.checkpoint_every", value, "expected a whole number of at least 1")
    for key, first in CHOICES.items():
        for value in ("foo", "null", "7", "[]"):
            yield _of(key, value, f"expected one of {first}")
    for option, keys in OPTIONS.items():
        for key in keys:
            for value in NO_NUMBERS:
                yield Wrong((option, f"{key}={value}"), f"{key}=")


def _of(key: str, value: str, expected: str) -> Wrong:
    return Wrong((f"{key}={value}",), f"{key}={SHOWN.get(value, value)}: {expected}")


def _names() -> Iterator[Wrong]:
    for group in GROUPS:
        yield Wrong((f"{group}=nope",), f"{group}=nope: expected one of ")
    for section in SECTIONS:
        for value in ("false", "5", "null"):
            shown = {"false": "False", "null": "None"}.get(value, value)
            yield Wrong((f"{section}={value}",), f"{section}={shown}: expected one of its values to be set, as in ")
    for section in TAKEN:
        yield Wrong((f"+{section}.nope=1",), f"{section}.nope=1: {section} takes ")
        yield Wrong((f"{section}.nope=1",), f"Could not override '{section}.nope'")
    for value in ("5", "seed", "null"):
        yield Wrong((f"report.allow={value}",), "report.allow=")
    yield Wrong(("report.allow=[nope]",), "report.allow=nope: expected one of task, ")
    for value in ("5", "png", "null", "[gif]", "[5]"):
        yield Wrong((f"report.formats={value}",), "report.formats=")
    for value in ("null", "5", "[amp]"):
        yield Wrong((f"report.baseline={value}",), "report.baseline=")
    yield Wrong(("hydra.job.name=a/b",), "hydra.job.name=a/b: expected a name for files, without /")
    yield Wrong(("hydra.run.dir=wrong.py/run",), "hydra.run.dir=wrong.py/run: cannot write there (Not a directory)")
    yield Wrong(("hydra.run.dir=/proc/run",), "hydra.run.dir=/proc/run: cannot write there")
    yield Wrong(("resume=nowhere",), "resume=nowhere: no such folder")
    yield Wrong(("resume=.",), "resume=.: holds no checkpoint")
    yield Wrong(("resume=wrong.py",), "resume=wrong.py: no such folder")
    for value, said in (("null", "None"), ("nope.Nope", "nope.Nope"), ("torch.nope", "torch.nope"), ("5", "5")):
        yield Wrong((f"backend._target_={value}",), f"backend._target_={said}: expected a backend's class")
    for value in ("nope.Net", "torch.nope", "torch.nn.Linear", "5"):
        yield Wrong((f"task.model._target_={value}",), f"task.model._target_={value}: cannot be made (")
    yield Wrong(("+backend.nope=1",), "backend.nope=1: backend=fp32 takes no options")
    yield Wrong(("task.accumulate=3",), "task.accumulate=3: expected a divisor of task.batch_size=16")
    yield Wrong(("task.batch_size=65",), "task.batch_size=65: data=good has only 64 samples")
    yield Wrong(("task.clip_norm_type=3",), "task.clip_norm_type=3: expected one of 2, inf")
    yield Wrong(("task.loss=nope",), "task.loss=nope: expected one of cross_entropy")
    yield Wrong(("task.loss=mse",), "task.loss=mse: cannot be taken of data=good")
    yield Wrong(("task.model=[",), "task.model=[: ")


def _own() -> Iterator[Wrong]:
    for name, (_, said) in user.DATA.items():
        yield Wrong(("data._target_=wrong.load", f"+data.name={name}"), f"data._target_=load: {said}")
    for name, (_, said) in user.UNFIT.items():
        yield Wrong(("data._target_=wrong.unfit", f"+data.name={name}"), said)
    yield Wrong(("data._target_=wrong.raises",), "data._target_=raises: raises RuntimeError: no such file (")
    yield Wrong(("data._target_=wrong.exits",), "data._target_=exits: calls sys.exit(3) (")
    yield Wrong(("data._target_=wrong.nope",), "Error locating target 'wrong.nope'")
    yield Wrong(("data._target_=os.getcwd",), "data._target_=getcwd: expected a function that can")
    for name, (_, said) in user.NETWORKS.items():
        yield Wrong(("task.model._target_=wrong.network", f"+task.model.name={name}"), f"task.model*{said}")
    for name, (_, said) in user.LOSSES.items():
        node = f"{{_target_: wrong.loss, _partial_: true, name: {name}}}"
        yield Wrong((f"task.loss={node}",), f"task.loss*{said}")
