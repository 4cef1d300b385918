"""One save on its way from live state into a slot.

::

    start()     on the training thread, within save(): copies what may change at any time
    ...         a helper copies the rest beside the next forward and backward
    watch()     meanwhile, on another thread, if this is a trial: is anything not the same for a while?
    fence()     on the thread that is about to change the rest: copies what is left of it
    verdict()   once nothing is left: was anything written to before it was copied?
    judge()     at the fence, if this is a trial: which tensors are not the same any more?
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ftrun.checkpoint.staging.device import DeviceCopies
from ftrun.checkpoint.staging.moves import SMALL, Block, Move, Whole, batches, moves, split
from ftrun.checkpoint.staging.trust import TRIALS, Owned, Trust, Versions
from ftrun.checkpoint.staging.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from ftrun.checkpoint.memory.slot_memory import SlotMemory
    from ftrun.checkpoint.plan.planner import Copy, Plan
    from ftrun.checkpoint.staging.bulk import Ordered

TIMEOUT = 600.0
"""Seconds that a copy under way may take; a device that hangs is the only thing that could."""


_FEW = 4
"""Tasks that the training thread does as fast by itself; none moves much more than a slice."""

_RARER = 4
"""What is on trial is looked at again after this part of the time that has passed since the save."""


@dataclass
class Orders:
    """What to do with each byte.

    Attributes:
        now: movements before save() returns; probes among them.
        later: movements before the fence.
        probes: those that show by the end whether their tensors changed meanwhile.
        trial: movements, all of them in ``now``, to compare at the fence.
        versions: counters of the tensors that are moved later.
        late: names of those tensors.
        trial_versions: counters of those on trial.
        bulk: what is moved as a bulk, besides.
        alive: what must not be freed meanwhile; movements know addresses only.
    """

    now: list[Move] = field(default_factory=list)
    later: list[Move] = field(default_factory=list)
    probes: list[Move] = field(default_factory=list)
    trial: list[Move] = field(default_factory=list)
    versions: Versions = field(default_factory=Versions)
    late: set[str] = field(default_factory=set)
    alive: tuple[object, ...] = ()
    trial_versions: Versions = field(default_factory=Versions)
    bulk: Ordered | None = None

    @property
    def waiting(self) -> frozenset[str]:
        """Names of all tensors that are moved later."""
        return frozenset(self.late).union(self.bulk.names if self.bulk is not None else ())


def order(
    plan: Plan,
    memory: SlotMemory,
    tensors: Mapping[str, torch.Tensor],
    trust: Trust,
    owned: Owned | None,
    turn: int,
    copies: Sequence[Copy] | None = None,
) -> Orders:
    """Decide what is copied when.

    Args:
        plan: what this rank stores.
        memory: where to.
        tensors: the state's tensors by name, of which the plan's are parts.
        trust: what was seen of them so far.
        owned: memory of the tracked optimizers; None where everything is copied at once.
        turn: number of the save.
        copies: those of the plan that this is about; None for all.
    """
    kept: list[torch.UntypedStorage] = []
    orders = Orders(alive=(plan.copies if copies is None else copies, memory.mapping, kept))
    number = 0
    for copy in plan.copies if copies is None else copies:
        every = moves(copy, memory)
        level = -1 if owned is None else _level(copy, orders, tensors, trust, owned)
        if level >= 0:  # read later, when the script may have given the tensor other memory (`x.data = y`)
            kept.append(copy.tensor.untyped_storage())
        if level >= TRIALS:
            orders.late.add(copy.name)
            for move in every:
                number += 1
                now, later = split(move, number, turn)
                orders.now += now
                orders.probes += now
                orders.later += later
            continue
        orders.now += every
        if level >= 0:
            orders.trial += every
    return orders


def add(orders: Orders, bulk: Ordered, given: Sequence[torch.Tensor]) -> Orders:
    """Orders for the rest of a plan, with those for its bulk."""
    orders.bulk = bulk
    orders.alive = (*orders.alive, given)
    return orders


def _level(copy: Copy, orders: Orders, tensors: Mapping[str, torch.Tensor], trust: Trust, owned: Owned) -> int:
    """How far a tensor is trusted, below 0 for not at all; its counters are watched from now on where it is."""
    if copy.tensor.nbytes <= SMALL:
        return -1
    level = trust.level(copy.name)
    owner = owned.owner(tensors[copy.name]) if level >= 0 else None
    if owner is None:
        return -1
    versions = orders.versions if level >= TRIALS else orders.trial_versions
    return level if versions.watch(copy.name, owner, copy.tensor) else -1


class Snapshot:
    """One save under way. ``start`` and ``judge`` on the training thread, the rest on any.

    Args:
        orders: what to copy when.
        digests: work that reads live state too, by the name of the tensor; its results are the caller's.
        streams: gives the stream for overlapping copies from a device.
        crowded: there is no processor to spare for a helper while the fence waits.
    """

    def __init__(
        self,
        orders: Orders,
        digests: Mapping[str, Callable[[], object]],
        streams: Callable[[torch.device], torch.cuda.Stream],
        *,
        crowded: bool = False,
    ) -> None:
        self._orders = orders
        self._crowded = crowded
        self._streams = streams
        self._devices: list[DeviceCopies] = []
        # They are long tasks: a helper takes them first, and nobody waits for their end alone.
        waiting = orders.waiting if digests else frozenset()
        first = [task for name, task in digests.items() if name not in waiting]
        later = [task for name, task in digests.items() if name in waiting]
        many = orders.bulk
        at_once = [*many.now.tasks(), *many.probes.tasks()] if many else []
        self._now = Work([*first, *_tasks(orders.now), *at_once])
        self._later = Work([*later, *_tasks(orders.later), *(many.later.tasks() if many else ())])
        self._alone = not first and len(self._now) <= _FEW
        self._verdict: frozenset[str] | None = None
        self._lock = threading.Lock()
        self._differed: set[str] = set()
        self._watched = threading.Lock()  # whoever has it reads what is on trial
        self._judged = threading.Event()

    def start(self, begun: Callable[[], None]) -> None:
        """Copy what can't wait. ``begun`` is called when a helper may begin with :meth:`help`.

        Raises:
            BaseException: an interrupt, or what a device raised. :meth:`verdict` raises it too: training may go on, and
                what was not copied by then is not what it was.
        """
        try:
            self._issue()
            if self._alone:  # a thread that is woken up for so little only gets in the way
                self._now.help()
            begun()
            self._now.help(from_end=True)
            self._now.wait(TIMEOUT)
        except BaseException as problem:
            self._now.fail(problem)
            raise

    def help(self) -> None:
        """Do what there is to do, on a helper's thread."""
        self._now.help()
        self._later.help()

    def fence(self) -> None:
        """On return nothing that is moved later is still to be read."""
        if self._crowded:
            self._later.keep()
        self._later.help(from_end=True)
        self._later.wait(TIMEOUT)
        for device in self._devices:
            device.fence()
        self._check()

    def verdict(self) -> frozenset[str]:
        """Wait for what is left; names of tensors that were written to before they were copied. Empty: it is whole.

        Raises:
            BaseException: what copying raised.
        """
        for work in (self._now, self._later):
            work.wait(TIMEOUT)
        # Counters count from when a write is issued, so they are looked at when the device is done, or at the fence.
        differ = [name for device in self._devices for name in device.finish()]
        for work in (self._now, self._later):
            if work.error is not None:
                raise work.error
        return self._check().union(differ)

    def _check(self) -> frozenset[str]:
        """Look at counters and probes, once, as soon as all is copied: what happens later does no harm."""
        with self._lock:
            if self._verdict is None:
                changed = {move.name for move in _here(self._orders.probes) if not move.is_same()}
                blocks = (move for move in self._orders.later if isinstance(move, Block))
                changed |= {move.name for move in blocks if not move.is_same_at_ends()}
                if self._orders.bulk is not None:
                    changed |= self._orders.bulk.changed()
                self._verdict = frozenset(changed | self._orders.versions.changed())
            return self._verdict

    @property
    def is_trial(self) -> bool:
        """Whether something is compared at the fence."""
        return bool(self._orders.trial)

    def watch(self) -> None:
        """Look at what is on trial until the fence, less and less often.

        A script may give weights other values past torch's counters (``x.data.copy_(average)``, for an evaluation),
        and their own again before the optimizer steps: they are the same at the fence, and were not when they would
        have been copied.
        """
        began = time.monotonic()
        every = [*batches(_here(self._orders.trial))]
        every.reverse()  # the script goes from the first to the last, and is met on its way, not run ahead of
        pause = 0.0
        while not self._judged.wait(pause):
            for batch in every:
                with self._watched:
                    if self._judged.is_set():
                        return
                    _compare(batch, self._differed)
            pause = (time.monotonic() - began) / _RARER

    def judge(self, trust: Trust, helper: Callable[[Callable[[], None]], None], *, by_step: bool) -> None:
        """Tell ``trust`` how a trial went. On return nothing of it reads live state any more.

        Args:
            trust: hears of it.
            helper: has a job done on another thread.
            by_step: an optimizer's step begins now; otherwise nothing is learned from what stayed the same.
        """
        trial = self._orders.trial
        with self._watched:
            self._judged.set()
        if not trial or self._now.error is not None:  # what was not copied differs, and nobody has written to it
            return
        for device in self._devices:
            device.finish()
        changed = self._orders.trial_versions.changed()
        work = Work(partial(_compare, each, changed) for each in batches(_here(trial)))
        helper(work.help)
        _compare([move for move in trial if _is_on_cuda(move)], changed)  # other threads have other streams
        work.help(from_end=True)
        work.wait(TIMEOUT)
        every = {move.name for move in trial}
        if not self._differed <= changed:  # whoever swaps some swaps others, which a look may have come too late for
            changed |= every
        trust.saw(every if by_step else set(), changed)

    def _issue(self) -> None:
        groups: defaultdict[torch.device, tuple[list[Whole], list[Whole], list[Whole]]] = defaultdict(
            lambda: ([], [], [])
        )
        for kind, chosen in enumerate((self._orders.now, self._orders.later, self._orders.probes)):
            for move in chosen:
                if isinstance(move, Whole) and _is_on_cuda(move):
                    groups[move.source.device][kind].append(move)
        for device, (now, later, probes) in groups.items():
            copies = DeviceCopies(device, self._streams(device))
            copies.issue(now, later, probes)
            self._devices.append(copies)


def _is_on_cuda(move: Move) -> bool:
    return isinstance(move, Whole) and move.source.is_cuda


def _tasks(chosen: Iterable[Move]) -> Iterator[Callable[[], None]]:
    return (partial(_run, batch) for batch in batches(_here(chosen)))


def _here(chosen: Iterable[Move]) -> Iterator[Move]:
    return (move for move in chosen if not _is_on_cuda(move))


def _run(batch: list[Move]) -> None:
    for move in batch:
        move.run()


def _compare(batch: list[Move], changed: set[str]) -> None:
    for move in batch:
        if move.name not in changed and not move.is_same():
            changed.add(move.name)
