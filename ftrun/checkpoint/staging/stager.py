"""Takes snapshots of live state into slots, at a cost to the training thread that is as small as can be told safe."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, Protocol

import torch

from ftrun.checkpoint.staging import digests, snapshot
from ftrun.checkpoint.staging.bulk import Bulk
from ftrun.checkpoint.staging.fence import Fence
from ftrun.checkpoint.staging.snapshot import Snapshot
from ftrun.checkpoint.staging.trust import Owned, Trust
from ftrun.checkpoint.staging.work import Helper

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ftrun.checkpoint.memory.slot_memory import SlotMemory
    from ftrun.checkpoint.plan.planner import Plan
    from ftrun.checkpoint.state import Alike


class Finish(Protocol):
    """What to do when nothing is left to copy. Called once for each snapshot, on the helper's thread."""

    def __call__(self, torn: Collection[str], found: Mapping[str, str], error: BaseException | None) -> None:
        """End a save.

        Args:
            torn: tensors that were written to before they were copied. The snapshot is of no moment then.
            found: digests of the tensors that the plan wants verified.
            error: what copying raised.
        """


class Stager:
    """Takes one snapshot at a time.

    Args:
        overlap: copy what tracked optimizers own beside the next forward and backward.
        crowded: there are no processors beyond those that the ranks keep busy. At the fence a helper would take one
            from some rank, and all wait for the slowest: so each does there what is left by itself.

    Attributes:
        held: seconds that the fence of the last snapshot held the training; 0 before it.
    """

    def __init__(self, *, overlap: bool, crowded: bool = False) -> None:
        self.held = 0.0
        self._crowded = crowded
        self._overlap = overlap
        self._optimizers: list[torch.optim.Optimizer] = []
        self._trust = Trust()
        self._helper = Helper()
        self._judge = Helper()  # of trials, while the first one sums up what it has copied
        self._fence = Fence(lambda: self.fence(by_step=True))
        self._pending: Snapshot | None = None
        self._lock = threading.Lock()
        self._turn = 0
        self._bulk: Bulk | None = None
        self._known: tuple[object, ...] = ()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def watch(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Say which optimizers' parameters and state change in their steps alone, as far as anyone can tell yet."""
        self._optimizers = list(optimizers)
        if self._optimizers and self._overlap:
            self._fence.install()

    def in_background(self, job: Callable[[], None]) -> None:
        """Have something done by the helper, after what it has to do."""
        self._helper.submit(job)

    def stage(
        self,
        plan: Plan,
        memory: SlotMemory | None,
        tensors: Mapping[str, torch.Tensor],
        finish: Finish,
        alike: Alike | None = None,
    ) -> None:
        """Take a snapshot. Returns when all is copied that anything but the tracked optimizers' steps may change.

        The one before is settled. Training thread only.

        Args:
            plan: what this rank stores.
            memory: of ``plan.size`` bytes; None for none.
            tensors: the state's tensors by name.
            finish: hears when all is copied.
            alike: how they lie, where that is known.
        """
        self.held = 0.0
        self._turn += 1
        orders = snapshot.Orders()
        if memory is not None:
            ctypes.memmove(memory.address, plan.header, len(plan.header))
            again = self._again(plan, memory, alike) if alike is not None else None
            orders = again or self._anew(plan, memory, tensors)
        found: dict[str, str] = {}
        made = Snapshot(orders, digests.tasks(plan.verify, found), self._stream, crowded=self._crowded)
        made.start(lambda: self._helper.submit(lambda: self._end(made, found, finish)))
        self._pending = made
        if made.is_trial:
            self._judge.submit(made.watch)

    def _anew(self, plan: Plan, memory: SlotMemory, tensors: Mapping[str, torch.Tensor]) -> snapshot.Orders:
        return snapshot.order(plan, memory, tensors, self._trust, self._owned(), self._turn)

    def _owned(self) -> Owned | None:
        return Owned(self._optimizers) if self._optimizers and self._overlap else None

    def _again(self, plan: Plan, memory: SlotMemory, alike: Alike) -> snapshot.Orders | None:
        """The orders from what is known of the save before; None where that is too little."""
        known = (plan.draft, alike.token, self._trust.generation)
        if self._known != known:
            self._bulk, self._known = Bulk(plan, plan.tensors, self._trust), known
        assert self._bulk is not None, "made above"
        owned = self._owned()
        try:
            bulk = self._bulk.order(alike, owned, memory.address, self._turn)
        except RuntimeError:  # of what was made in inference mode
            return None
        if bulk is None:
            return None
        rest = plan.some(self._bulk.rest)
        tensors = {each.name: alike.given[self._bulk.places[each.name]] for each in rest}
        orders = snapshot.order(plan, memory, tensors, self._trust, owned, self._turn, rest)
        return snapshot.add(orders, bulk, alike.given)

    def _end(self, made: Snapshot, found: Mapping[str, str], finish: Finish) -> None:
        torn: Collection[str] = ()
        error: BaseException | None = None
        made.help()
        try:
            torn = made.verdict()
        except BaseException as problem:  # whoever started the save hears of it
            error = problem
        self._trust.distrust(torn)
        finish(torn, found, error)
        if self._bulk is not None:  # the next save waits for this thread before it looks
            self._bulk.foresee(self._turn + 1)

    def fence(self, *, by_step: bool) -> None:
        """Nothing under way reads live state any more. Quick when nothing is.

        Args:
            by_step: an optimizer is about to step.
        """
        if self._pending is None:
            return
        with self._lock:  # a step may come from a thread of autograd
            self._pass_fence(by_step=by_step)

    def _pass_fence(self, *, by_step: bool) -> None:
        pending, began = self._pending, time.monotonic()
        if pending is not None:
            pending.fence()
            pending.judge(self._trust, self._judge.submit, by_step=by_step)
            self._pending = None
            self.held += time.monotonic() - began

    def settle(self, timeout: float) -> bool:
        """Wait until the snapshot under way is finished; whether it is."""
        self.fence(by_step=False)
        return self._helper.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Finish what is under way, and end; whether all is finished."""
        settled = self.settle(timeout)
        self._fence.remove()
        self._helper.close(timeout if settled else 0.0)
        self._judge.close(timeout if settled else 0.0)
        return settled

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]
