"""What dead writers left behind: attempts to save that will never be checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint import epochs, retention
from ftrun.checkpoint.layout import LATEST, MANIFEST, AttemptName, attempt_key, is_given_up, is_rank_file
from ftrun.checkpoint.names import ATTEMPTS
from ftrun.checkpoint.storage.base import IrregularError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ftrun.checkpoint.layout import Root


@dataclass(frozen=True)
class _Sight:
    files: dict[str, int]
    since: float  # by the clock of this process


class Leftovers:
    """Deletes them once they were seen, unchanged, twice and long enough apart. One thread uses it.

    An attempt is a leftover when it has no manifest, when its epoch is older than ours and its epoch's record names
    our run. How long ago it was written doesn't count: clocks of machines differ, and times get lost in copies.

    Args:
        root: the checkpoint root.
        run_id: identity of the run.
        epoch: our epoch.
        parent: the checkpoint that the run was resumed from; it stays.
        wait: seconds for which it has to lie unchanged before our eyes.
        clock: a monotonic clock.
    """

    def __init__(
        self,
        root: Root,
        *,
        run_id: str,
        epoch: int,
        parent: str | None = None,
        wait: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._run_id, self._epoch, self._parent = root, run_id, epoch, parent
        self._wait, self._clock = wait, clock
        self._seen: dict[AttemptName, _Sight] = {}

    def sweep(self) -> list[AttemptName]:
        """Look once more; the names of what was deleted. Only the leader of the newest epoch calls this.

        Raises:
            OSError: the storage can't be read, or a deletion failed.
        """
        if epochs.newest(self._root) > self._epoch:
            return []
        now = self._clock()
        seen = {name: self._look(name, now) for name in self._candidates()}
        self._seen = {name: sight for name, sight in seen.items() if sight is not None}
        ripe = [name for name, sight in self._seen.items() if now - sight.since >= self._wait]
        return [name for name in sorted(ripe) if self._delete(name)]

    def _candidates(self) -> list[AttemptName]:
        # A checkpoint whose manifest was lost by mistake can still be repaired by its owner.
        spared = retention.spared(self._root, self._parent, _promised(self._root))
        old = [name for name in self._root.attempts() if name.epoch < self._epoch and str(name) not in spared]
        ours = {epoch for epoch in {name.epoch for name in old} if self._is_ours(epoch)}
        return [name for name in old if name.epoch in ours]

    def _is_ours(self, epoch: int) -> bool:
        record = epochs.read(self._root, epoch)
        return record is not None and record.run_id == self._run_id

    def _look(self, name: AttemptName, now: float) -> _Sight | None:
        files = self._root.files(name)
        if self._has_manifest(name, files):
            return None
        before = self._seen.get(name)
        return before if before is not None and before.files == files else _Sight(files, now)

    def _has_manifest(self, name: AttemptName, files: Collection[str]) -> bool:
        """Also one that no listing of files shows: a link, which may lead somewhere tomorrow."""
        return MANIFEST in files or MANIFEST in self._root.storage.names(f"{ATTEMPTS}/{name}")

    def _delete(self, name: AttemptName) -> bool:
        files = self._root.files(name)
        if self._has_manifest(name, files) or files != self._seen.pop(name).files:
            return False
        known = [file for file in files if is_rank_file(file) or is_given_up(file) or retention.is_leftover(file)]
        # What vouches for files never outlives them: with these gone, nobody can commit what is half deleted.
        vouching = [file for file in known if file.startswith("done/")]
        self._root.delete_files(name, vouching)
        if self._root.size(attempt_key(name, MANIFEST)) is not None:
            return False
        self._root.abort_uploads(name)
        self._root.delete_files(name, [file for file in known if file not in vouching])
        return self._root.remove_attempt(name)


def _promised(root: Root) -> str | None:
    try:
        return root.read(LATEST).decode("ascii").strip()
    except (FileNotFoundError, IrregularError, ValueError):
        return None
