"""How ranks agree on what only some of them know: when the interval in seconds is over, that a stop was asked for.

No collective runs on the training process group, and nothing is exchanged at every step. Ranks meet at *points*:
boundaries between steps whose numbers all ranks know. At a point rank 0 publishes one instruction under the
point's number in the group's store (whether to save, whether to stop, and the number of the next point, about a
second ahead), and the others read it.
"""

from __future__ import annotations

import datetime as dt
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ftrun.errors import AgreementTimeout, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from ftrun.session.place import Place

_DEADLINE = dt.timedelta(minutes=30)
"""As long as torch's own default for a collective: a rank may be slow, but not for ever."""

_POINT_PERIOD = 1.0
_MOST_STEPS_AHEAD = 100


@dataclass(frozen=True)
class Instruction:
    """What all ranks do at one point.

    Attributes:
        save: take a checkpoint now.
        stop: why to stop now, or None.
        next_point: step after which the ranks meet again.
    """

    save: bool
    stop: str | None
    next_point: int


def steps_ahead(seconds_per_step: float, before: int) -> int:
    """How many steps lie between two points, so that they come about once a second.

    Steps that become slow put the next point off. So their number grows by doubling only, from the pace of many
    steps, and not far: a point costs less than a millisecond.

    Args:
        seconds_per_step: mean since the last point.
        before: steps between the last two points.
    """
    wanted = _POINT_PERIOD / seconds_per_step if seconds_per_step > 0 else _MOST_STEPS_AHEAD
    return max(1, int(min(wanted, 2 * before, _MOST_STEPS_AHEAD)))


def connect(place: Place, scope: str, *, deadline: dt.timedelta = _DEADLINE) -> Store | None:
    """A client of the group's store with its own key space; None for a group of one.

    Args:
        place: where this rank stands.
        scope: name of the key space; ranks with the same scope see each other's values.
        deadline: how long to wait for the store to answer, now and in each later call.

    Raises:
        AgreementTimeout: nothing answers at the group's address.
        UsageError: nobody has started the group's store yet.
    """
    if place.world_size == 1:
        return None
    import torch.distributed as dist

    if not place.agent_store and not dist.is_initialized():
        # Every rank would knock until the deadline.
        raise UsageError(
            "with process_group=False nothing hosts the store of this group yet: start the script with ftrun, or call "
            "torch.distributed.init_process_group() before the Session."
        )
    try:
        store = dist.TCPStore(
            place.store_host, place.store_port, is_master=False, timeout=deadline, wait_for_workers=False
        )
    except dist.DistError as error:
        raise AgreementTimeout(
            f"rank {place.rank} can't reach the store of its group at {place.store_host}:{place.store_port}: {error}"
        ) from error
    return dist.PrefixStore(f"ftrun/{scope}", store)


class Agreement:
    """The meeting points of one attempt. Called on the training thread of every rank.

    Args:
        place: where this rank stands.
        store: from :func:`connect`; None for a group of one.
        first_point: step after which the ranks meet for the first time, the same on all ranks.
        deadline: how long a rank waits for rank 0 at a point.
    """

    def __init__(
        self, place: Place, store: Store | None, *, first_point: int, deadline: dt.timedelta = _DEADLINE
    ) -> None:
        self._rank = place.rank
        self._store = store
        self._point = first_point
        self._deadline = deadline
        self._since = time.monotonic()
        self._last_step = first_point - 1
        self._saves_heard = 0

    def at(self, step: int, decide: Callable[[], tuple[bool, str | None]], *, meet: bool = False) -> Instruction | None:
        """The instruction of a point, or None when ``step`` is not one.

        Args:
            step: steps completed, the same on all ranks.
            decide: called on rank 0 only; whether to save, and why to stop.
            meet: make a point of this step, on all ranks alike.

        Raises:
            AgreementTimeout: rank 0 published nothing within the deadline, or the store is gone.
        """
        if step < self._point and not meet:
            return None
        instruction = self._publish(step, *decide()) if self._rank == 0 else self._read(step)
        self._point = instruction.next_point
        return instruction

    def _publish(self, step: int, save: bool, stop: str | None) -> Instruction:
        now = time.monotonic()
        made = max(1, step - self._last_step)
        ahead = steps_ahead((now - self._since) / made, made)
        self._since, self._last_step = now, step
        instruction = Instruction(save, stop, step + ahead)
        if self._store is not None:
            self._store.set(f"point/{step}", json.dumps(asdict(instruction)))
        return instruction

    def _read(self, step: int) -> Instruction:
        if self._store is None:
            raise AssertionError("a rank above 0 has a store")
        key = f"point/{step}"
        try:
            self._store.wait([key], self._deadline)
        except RuntimeError as error:
            import torch.distributed as dist

            if isinstance(error, dist.DistNetworkError):
                raise AgreementTimeout(
                    f"rank {self._rank} lost the store of its group at step {step}: look into the logs of rank 0 and "
                    f"of the launcher on its node ({error})"
                ) from error
            raise AgreementTimeout(
                f"rank {self._rank} heard nothing from rank 0 about step {step} for {self._deadline}; did all ranks "
                f"make the same number of steps? ({error})"
            ) from error
        return Instruction(**json.loads(self._store.get(key)))

    def ask_to_stop(self, reason: str) -> None:
        """Tell rank 0, from any rank, that the run should stop at the next point."""
        if self._store is not None:
            self._store.set("stop", reason)

    def asked_to_stop(self) -> str | None:
        """What another rank asked for. Rank 0 only."""
        if self._store is None or not self._store.check(["stop"]):
            return None
        return bytes(self._store.get("stop")).decode()

    def ask_to_save(self) -> None:
        """Ask rank 0, from any other rank, for a checkpoint at the next point."""
        if self._store is not None:
            self._store.add("saves", 1)

    def asked_to_save(self) -> bool:
        """Whether another rank has asked since the last call. Rank 0 only."""
        if self._store is None:
            return False
        before, self._saves_heard = self._saves_heard, self._store.add("saves", 0)
        return self._saves_heard > before
