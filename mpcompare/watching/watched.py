"""``mpcompare.watch``: a loop that somebody else wrote, seen for some updates."""

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpcompare import generators
from mpcompare.errors import InputError, check_whole
from mpcompare.tasks.groups import params_in
from mpcompare.verdict.examine.forced.hooks import put_back_collected
from mpcompare.verdict.examine.forced.samples import EarlierSteps
from mpcompare.verdict.judge.check import listed
from mpcompare.verdict.judge.limits import COARSEST
from mpcompare.watching import expecting
from mpcompare.watching.attach import attached, inner_of
from mpcompare.watching.defects import defects_of
from mpcompare.watching.defects_of_layers import of_gradients
from mpcompare.watching.examining import Replayed, Updates, compared, replayed
from mpcompare.watching.facts import facts_of
from mpcompare.watching.guard import Guard
from mpcompare.watching.judged import Defect, HowFar, sight_of
from mpcompare.watching.looking import Look
from mpcompare.watching.steps import Sum
from mpcompare.watching.sums import hooks_after
from mpcompare.watching.terminal import one_by_one, quietly

NOTHING = "nothing was seen"
_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()  # networks and optimizers


class WrongTraining(AssertionError):  # noqa: N818 - said as it is, like BrokenContract
    """A loop has defects, is not what was expected, or was not seen. The message has a line for each."""


class Watch:
    """A loop that was seen: ``with mpcompare.watch(model, optimizer) as seen``.

    Attributes:
        facts: the card of the last look, fact by name; empty until what it saw was compared.
        defects: what no intention makes right, in any look.
        not_examined: what could not be seen, in words.
        look: the last look.
        replays: the replays of the sums of gradients that the look saw.
        sight: how much of the network the look of the card saw, and the smallest error that it would have found; None
            until a look was compared.
    """

    def __init__(self, model: Any, optimizer: Any, steps: int, after: int, every: int | None, eager: bool) -> None:
        check_whole("watch: steps", steps, at_least=1)
        check_whole("watch: after", after, at_least=0)
        if every is not None:
            check_whole(f"watch: steps={steps}, every", every, at_least=steps)
        self.attached = attached(model, optimizer, eager)
        self._networks = list(map(inner_of, self.attached.models.values()))
        self.steps, self.after, self.every = steps, after, every
        self.facts: dict[str, Any] = {}
        self.defects: list[Defect] = []
        self.not_examined: list[str] = []
        self.look: Look | None = None
        self._looks: list[Look] = []  # the looks whose modes may still be entered
        self.replays: list[Replayed] = []
        self.sight: HowFar | None = None
        self.entered = self._open = False  # _open: whether the block has not ended
        self._count = self._compared = 0
        self._error = ""  # an error of the watch itself, in words
        self._earlier = EarlierSteps()
        self._counting = Guard()
        self._handles: list[Any] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # the optimizers that it knows of
        self._stepping = False  # whether an optimizer that is watched takes a step: it may call others

    def __enter__(self) -> "Watch":
        for model in self._networks:
            if model in _watched:
                raise InputError("watch: model", type(model).__name__, "is watched already")
        self.entered = self._open = True
        try:
            self._enter()
        except BaseException:
            self._leave()
            raise
        return self

    def _enter(self) -> None:
        _watched.update([*self._networks, *self.attached.optimizers.values()])
        self._handles.append(register_optimizer_step_post_hook(partial(self._counting, self._other)))
        for name, optimizer in self.attached.optimizers.items():  # hooks stay on until the block ends
            self._handles.append(optimizer.register_step_pre_hook(partial(self._before, name)))
            last = optimizer.register_step_post_hook(partial(self._after, name))
            # A hook of the loop may change the weights, and so comes after the look at the update.
            cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(last.id, last=False)
            self._handles.append(last)
        if self.after == 0:
            self._begin()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        _watched.difference_update([*self._networks, *self.attached.optimizers.values()])
        for look in reversed(self._looks):  # a mode may lie above another
            look.stop()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._leave()
        self._open = False
        self._compare()
        self._note(self._counting.error)
        if error is not None:
            self.not_examined.append(f"what came after the loop stopped with {type(error).__name__}")

    def _begin(self) -> None:
        """Begins to look. The look before is compared first, and freed: it is as large as its activations."""
        self._compare()
        if self.look is not None:
            self.look.stop()
        self.look = Look(self.attached, self._taken)
        self._looks = [*(each for each in self._looks if each.entered), self.look]
        self.look.start()

    @property
    def _looking(self) -> Look | None:
        """The look that is under way."""
        return self.look if self.look is not None and self.look.on else None

    def _compare(self) -> None:
        """Compares what the last look saw."""
        if self.look is None:
            return
        examining, device = Guard(), next(self.attached.network.parameters()).device
        with generators.kept(device), quietly(self.attached.network):
            examining(self._examine, self.look)
        if examining.error:  # a part of the findings makes no card
            self.facts = {}
        self._error = self._error or self.look.guard.error or examining.error
        self._note(self.look.guard.error, examining.error)

    def _note(self, *said: str) -> None:
        self.not_examined += [each for each in said if each and each not in self.not_examined]

    def _before(self, name: str, optimizer: Any, args: Any, kwargs: Any) -> Any:
        look, self._stepping = self._looking, True
        return look.guard(look.steps.before, name, args, kwargs) if look is not None else None

    def _after(self, name: str, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Looks at an update. Counts the updates of the first optimizer, and begins to look when a look is due."""
        look, self._stepping = self._looking, False
        if look is not None:
            look.guard(look.steps.after, name)
        if name == next(iter(self.attached.optimizers)):
            self._counting(self._counted)

    def _other(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Is told of a step of any optimizer, and notes an optimizer that no watch was given."""
        if optimizer in _watched or optimizer in self._known or self._stepping:
            return
        self._known.add(optimizer)
        if self.attached.name_of(optimizer) is None:
            own = set(map(id, self.attached.network.parameters()))
            count = sum(id(p) in own for p in params_in(optimizer))
            has = f"{count} parameters" if count > 1 else "1 parameter" if count else "no parameter"
            said, known = f"{type(optimizer).__name__}, which has {has} of the network", self.attached.strangers
            known += [said] if said not in known else []

    def _counted(self) -> None:
        self._count += 1
        since = self._count - self.after
        again = since == 0 or (self.every is not None and since > 0 and since % self.every == 0)
        if again and self._looking is None:
            self._begin()

    def _taken(self) -> None:
        """Ends the look when enough updates were seen. A scaler may still set its scale after the last update."""
        look = self._looking
        if look is None:
            return
        updates = [t for t in look.taken if not t.skipped]
        enough = len(updates) >= self.steps * len(self.attached.optimizers)
        if enough or len(look.taken) >= 8 * self.steps + 40:
            look.stop()

    def _examine(self, look: Look) -> None:
        """Makes the card, and adds to the list of defects."""
        seen = look.used()
        if self._compared and len(seen) > 1:  # a replay takes as long as many steps: later looks have one
            seen = [seen[self._compared % len(seen)]]
            self._note("the layers of other updates than one in each look after the first")
        self._compared += 1
        sums = {each: self._replayed(look, each) for each in one_by_one(seen)}
        precision, stepped = next((r.precision for r in sums.values()), "fp32"), {t.optimizer for t in look.taken}
        updates = {name: compared(look, name, precision) for name in self.attached.optimizers if name in stepped}
        facts = facts_of(look, sums, updates)
        self.facts = facts if facts["updates"] or not self.facts else self.facts
        self.defects += [d for d in defects_of(look, sums, updates) if d not in self.defects]
        self.replays = list(sums.values())
        if self.facts is facts:  # else the card is an earlier look's
            self.sight = sight_of(look, sums)
        self._say(look, sums, updates)

    def _replayed(self, look: Look, seen: Sum) -> Replayed:
        """Returns a sum, replayed. It gets samples of its own where the roundings of earlier sums leave a defect."""
        known = bool(self._earlier.kept)
        stance = torch.compiler.set_stance("force_eager") if self.attached.eager else nullcontext()
        with stance, put_back_collected(look.network):
            replay = replayed(look, seen, self._earlier)
            again = known and any(of_gradients(look, {seen: replay}))
            return replayed(look, seen, EarlierSteps()) if again else replay

    def _say(self, look: Look, sums: Mapping[Sum, Replayed], updates: Mapping[str, Updates]) -> None:
        numbers: dict[tuple[str, str], list[str]] = {}
        used = look.used()
        for seen, replay in sums.items():
            if replay.why:
                number = used.index(seen) + 1
                what = "the loss of update {}" if replay.layers else "the gradients of update {}, layer by layer"
                numbers.setdefault((what, replay.why), []).append(str(number))
        said = [f"{what.format(', '.join(each))} ({why})" for (what, why), each in numbers.items()]
        hooked = {name for each in used for name in each.hooked}
        if not used and not any(t.in_backward for t in look.taken):  # hooks may use the gradients, and clear them
            hooked = {name for name, p in look.params.items() if hooks_after(p)}
        if hooked:
            said.append(f"the gradients of {listed(sorted(hooked))}, which hooks of the loop may change")
        if self.attached.hides_layers:
            said.append("layers within compiled modules (eager=True shows them)")
        elif self.attached.eager:
            said.append("compiled code: the updates ran without a compiler")
        if self.attached.others:
            said.append(f"{self.attached.others} parameters of the optimizer that the network does not have")
        said += [f"updates of {each}: the watch was not given it" for each in self.attached.strangers]
        for update in updates.values():
            for reason in dict.fromkeys(update.unknown.values()):
                of = listed([name for name, why in update.unknown.items() if why == reason])
                said.append(f"updates of {of} ({reason})" if update.rules else f"updates ({reason})")
        if any(t.closures for t in look.taken):
            said.append("updates of an optimizer that calls its closure several times")
        if any(t.sum is None and t.given and not t.in_backward for t in look.taken):
            said.append("gradients that no backward made, or one in compiled code or in a hook of another one")
        whole = [t for t in look.taken if t.sum is not None and not t.sum.hidden]
        if by_loop := sorted({name for t in whole for name in t.given.keys() - t.raw.keys()}):
            said.append(f"the gradients of {listed(by_loop)}, which the loop itself sets")
        if any(t.in_backward for t in look.taken):
            said.append("gradients of an optimizer that takes its steps within backward")
        self._note(*said)

    @property
    def verdict(self) -> str:
        """``defects``, ``nothing was seen``, ``gradients not seen``, or ``no defect``."""
        if self.defects:
            return "defects"
        if not self.facts.get("updates"):
            return NOTHING
        return "gradients not seen" if self.sight is not None and self.sight.is_blind else "no defect"

    def _headline(self) -> str:
        """Returns the answer in a line."""
        count = len(self.defects)
        found = {0: "no defect", 1: "1 defect"}.get(count, f"{count} defects")
        if not self.facts.get("updates"):
            return found if count else f"{NOTHING}: {self._why_nothing()}"
        updates = f"{self.facts['updates']} update{'s' if self.facts['updates'] > 1 else ''}"
        if self.verdict == "gradients not seen":
            return f"the gradients of {updates} are not seen, and the rest has no defect"
        return f"{found} in {updates}: {self.sight}"

    def raise_if_wrong(self, expect: Mapping[str, Any] | str | Path | None = None) -> None:
        """Raises WrongTraining if there are defects, if nothing was seen, or if a fact is not as expected.

        Args:
            expect: facts by name, or a file that :meth:`save` wrote.
        """
        __tracebackhide__ = True  # pytest then shows the line of the test
        lines = [str(defect) for defect in self.defects]
        headline = "the training is wrong:" if lines else "the training is not what was expected:"
        if not self.facts.get("updates"):
            headline = headline if lines else "the training was not seen:"
            lines.append(f"{NOTHING}: {self._why_nothing()}")
        elif expect is not None:
            lines += expecting.differences(self.facts, expect)
        if lines:
            raise WrongTraining("\n  ".join([headline, *lines]))

    def _why_nothing(self) -> str:
        if self._error:
            return "the watch itself stopped with an error"
        if self._open:
            return "the block is still open, and what it sees is compared when it ends"
        if 0 < self._count <= self.after:
            return f"the block has {self._count} updates, and looking begins after {self.after}"
        if not self.entered:
            return "the block was not entered"
        if skipped := self.facts.get("skipped"):
            return f"the scaler skipped all {skipped} steps"
        if self.attached.strangers:
            return f"no optimizer that is watched took a step, and others did: {'; '.join(self.attached.strangers)}"
        if self.look is not None and self.look.sums.backwards:
            return "no optimizer that is watched took a step, and backward made gradients: another one may have"
        return "no optimizer took a step within the block"

    def save(self, file: str | Path) -> None:
        """Writes the card to a file, which ``expect`` takes."""
        if not self.facts.get("updates"):
            raise InputError("watch: save", str(file), f"{NOTHING}: there is no card")
        expecting.save(self.facts, file)

    def __str__(self) -> str:
        lines = [self._headline()]
        shown = {name: expecting.said(value) for name, value in self.facts.items() if value not in ([], {})}
        width = max(map(len, shown), default=0)
        lines += [f"  {name:<{width}}  {value}" for name, value in shown.items()]
        lines += [f"defect: {defect}" for defect in self.defects]
        if self.sight is not None and self.sight.blind:
            lines.append(f"not seen: an error of {100 * COARSEST:g} % would not be found in {listed(self.sight.blind)}")
        for planted in self.sight.not_flagged if self.sight is not None else ():
            lines.append(f"not seen: an error that was planted is not flagged: {planted}")
        lines += [f"not examined: {each}" for each in self.not_examined]
        return "\n".join(lines)
