"""Watching a training loop that nobody rewrote: what it does, and what is wrong with it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpcompare.watching.watched import Watch


def watch(
    model: Any, optimizer: Any, steps: int = 5, after: int = 0, every: int | None = None, eager: bool = False
) -> "Watch":
    """Looks on while a loop trains.

        with mpcompare.watch(model, optimizer) as seen:
            train_one_epoch(...)
        print(seen)
        seen.raise_if_wrong(expect={"clip_norm": 1.0, "precision": "bf16"})

    Nothing that the loop computes is changed, unless ``eager`` asks for it. The hooks are gone after ``steps`` updates.
    What was seen is compared before the next look, or when the block ends.

    Args:
        model: the module that the loop trains, or a wrapper of it.
        optimizer: the optimizer of its parameters, or a wrapper of it; or several by name, or in a list.
        steps: the number of updates that are looked at.
        after: the number of updates before the first look.
        every: the number of updates from the beginning of one look to the next; None: there is one look.
        eager: runs compiled code without the compiler in the updates that are looked at, so that its layers are seen.
            The layers then have the roundings of eager mode, and not the roundings of the compiled code.

    Raises:
        InputError: the optimizer has none of the module's parameters, or the module is watched already.
    """
    from mpcompare.watching.watched import Watch

    return Watch(model, optimizer, steps, after, every, eager)
