"""How ranks find out, through the store, what they hold in common. No collective, and every wait has a deadline.

They meet at a save of which all of them know that they must: the first one, and whenever the structure of the state
has changed. Whoever gets to a save first says what it is to be (``go``): who sees such a change, that all meet there;
anybody else, that nobody does. Who comes too late with the wish for a meeting has it at the next save, for which he
says so at once. In the meantime nothing new is shared. So a save at which nobody asks costs one answer of the store.

At a meeting each rank puts down a digest of what it says of its tensors, and what it says under that digest: most
ranks say the same, so it is there once. Rank 0 collects the digests, finds the groups, and publishes them for each
digest. What is published is the verdict for all; when it is not there in time, whoever notices publishes that there
is none. A verdict is written once, so ranks can't part over it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.plan.ownership import Described, agree
from ftrun.checkpoint.plan.pieces import ranks_of, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

_log = logging.getLogger(__name__)

_LATER, _MEET, _NOW, _LATE, _KNOWN = "later", "meet", "now", "late", "known"


class Exchange:
    """One rank's part in it. Training thread only.

    Args:
        rank: global rank.
        world_size: number of ranks.
        store: common to them, with a key space of the attempt's own.
        deadline: seconds that a rank waits for the others.
    """

    def __init__(self, rank: int, world_size: int, store: Store, deadline: float) -> None:
        self._rank, self._world_size, self._store = rank, world_size, store
        self._deadline = dt.timedelta(seconds=deadline)

    def is_on(self, save: int, *, asked: bool) -> bool:
        """Whether all ranks meet at this save.

        Args:
            save: its number.
            asked: whether this rank needs it.
        """
        try:
            if self._say(f"plan/{save}/go", _MEET if asked else _LATER) == _MEET and self._come(save):
                return True
            if asked:
                self._say(f"plan/{save + 1}/go", _MEET)
        except RuntimeError as error:  # torch's errors of stores
            self._complain(save, error)
        return False

    def _come(self, save: int) -> bool:
        here = f"plan/{save}/here"
        if self._store.add(here, 1) == self._world_size:
            self._tell(f"{here}/all", _NOW)
        return self._await(f"{here}/all", _LATER) == _NOW

    def groups(self, save: int, described: Sequence[Described]) -> dict[str, tuple[int, ...]] | None:
        """The ranks that hold each tensor alike, by its name; None when the ranks didn't come to an end in time.

        Args:
            save: its number; :meth:`is_on` was true for it.
            described: what this rank says of its tensors.
        """
        try:
            return self._groups(f"plan/{save}", save, described)
        except (RuntimeError, ValueError) as error:  # torch's errors of stores; what another version wrote there
            self._complain(save, error)
            return None

    def _groups(self, at: str, save: int, described: Sequence[Described]) -> dict[str, tuple[int, ...]] | None:
        text = _to_text(described)
        mine = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        if not self._store.check([f"{at}/said/{mine}"]):
            self._store.set(f"{at}/said/{mine}", text)
        self._store.set(f"{at}/rank/{self._rank}", mine)
        if self._rank == 0:
            self._lead(at)
        if self._await(f"{at}/verdict", _LATE) != _KNOWN:
            self._complain(save, None)
            return None
        found: dict[str, list[int]] = json.loads(self._store.get(f"{at}/groups/{mine}"))
        return {
            described[number].name: ranks_of(ranks) for ranks, numbers in found.items() for number in _unpacked(numbers)
        }

    def _lead(self, at: str) -> None:
        """Rank 0: find the groups."""
        keys = [f"{at}/rank/{rank}" for rank in range(self._world_size)]
        try:
            self._store.wait(keys, self._deadline)
        except RuntimeError:
            self._tell(f"{at}/verdict", _LATE)
            return
        sides: dict[str, list[int]] = defaultdict(list)
        for rank, said_by_it in enumerate(self._store.multi_get(keys)):
            sides[bytes(said_by_it).decode()].append(rank)
        said = {tuple(ranks): _from_text(self._store.get(f"{at}/said/{digest}")) for digest, ranks in sides.items()}
        agreed = agree(said)
        for digest, ranks in sides.items():
            groups = {ranks_text(group): _packed(numbers) for group, numbers in agreed[tuple(ranks)].items()}
            self._store.set(f"{at}/groups/{digest}", json.dumps(groups))
            with contextlib.suppress(RuntimeError, NotImplementedError):  # the large part; nobody reads it any more
                self._store.delete_key(f"{at}/said/{digest}")
        self._tell(f"{at}/verdict", _KNOWN)

    def _await(self, key: str, otherwise: str) -> str:
        """What was written under a key, which is ``otherwise`` at the deadline, if nobody has written anything."""
        with contextlib.suppress(RuntimeError):
            self._store.wait([key], self._deadline)
            return bytes(self._store.get(key)).decode()
        return self._say(key, otherwise)

    def _tell(self, key: str, value: str) -> None:
        """:meth:`_say` of what others wait for: a store that torch serves without libuv wakes nobody for that alone."""
        if self._say(key, value) == value:
            self._store.set(key, value)

    def _say(self, key: str, value: str) -> str:
        """Write where nothing is written yet; what is written there now."""
        return bytes(self._store.compare_set(key, "", value)).decode()

    def _complain(self, save: int, error: Exception | None) -> None:
        _log.warning(
            "ftrun: rank %d: the ranks did not find out within %g s what they hold in common%s; in save %d each stores "
            "all of its own, which takes more room. The next save tries again.",
            self._rank,
            self._deadline.total_seconds(),
            f" ({error})" if error else "",
            save,
        )


def _to_text(described: Sequence[Described]) -> str:
    rows = [[each.name, each.dtype, each.shape, each.contiguous, each.known, each.digest] for each in described]
    return json.dumps(rows, separators=(",", ":"))


def _from_text(text: bytes) -> list[Described]:
    rows: list[list[Any]] = json.loads(text)
    return [
        Described(name, dtype, tuple(shape), contiguous, known, digest)
        for name, dtype, shape, contiguous, known, digest in rows
    ]


def _packed(numbers: Sequence[int]) -> list[int]:
    """Ascending numbers as the bounds of their runs: ``[0, 3, 8, 9]`` for 0, 1, 2, 8."""
    bounds: list[int] = []
    for number in numbers:
        if bounds and bounds[-1] == number:
            bounds[-1] += 1
        else:
            bounds += [number, number + 1]
    return bounds


def _unpacked(bounds: Sequence[int]) -> list[int]:
    return [number for start, stop in zip(bounds[::2], bounds[1::2], strict=True) for number in range(start, stop)]
