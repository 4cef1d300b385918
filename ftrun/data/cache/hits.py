"""Files that are there: what each read of a warm cache costs, so as little as possible is done here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftrun.data.cache.leases import Lease, lease
from ftrun.data.cache.names import suffix_of
from ftrun.data.cache.refusals import DiskTrouble
from ftrun.data.cache.remote import local_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ftrun.data.cache.ahead import Ahead
    from ftrun.data.cache.names import Pointer
    from ftrun.data.cache.node import Node

MOST = 16_384
"""URLs that a process remembers the objects of: some ten megabytes."""


class _Known(NamedTuple):
    """Where the file of a URL lies.

    Attributes:
        path: for users.
        text: the same as a string.
        key: of the object.
        size: of the object.
    """

    path: Path
    text: str
    key: str
    size: int


class Hits:
    """Leases on files that are there. Any thread.

    What a pointer has said is remembered: it counts until the run ends anyway. That the object is still there, whole,
    and stays, is what each lease sees to.

    Args:
        node: the cache.
        since: what was learned of remotes before this time is to be asked again.
        ahead: to be told of reads.
    """

    def __init__(self, node: Node, since: float, ahead: Ahead) -> None:
        self._node = node
        self._since = since
        self._ahead = ahead
        self._known: dict[str, _Known] = {}

    def get(self, url: str) -> Lease | None:
        """A lease; None where the file isn't there, or the remote must be asked about it."""
        return self.get_all((url,))[0]

    def get_all(self, urls: Sequence[str]) -> list[Lease | None]:
        """The same for some files, one after the other: what finds them is in the processor's caches then."""
        remembered, owner = self._known, self._node.owner
        found: list[Lease | None] = []
        missing = 0
        for url in urls:
            known = remembered.get(url) or self._look_up(url)
            descriptor = None if known is None else self._lease(known.text, known.size)
            if known is None or descriptor is None:
                remembered.pop(url, None)
                missing += 1
                found.append(None)
                continue
            found.append(Lease(known.path, known.key, descriptor, owner))
            if self._ahead.is_ahead:
                self._ahead.read(local_path(url) or url)
        if missing < len(found):
            self._node.page.add("hits", len(found) - missing)
        return found

    def lease(self, url: str, pointer: Pointer) -> Lease | None:
        """A lease on what a pointer points to, which isn't counted; None where it isn't there.

        Args:
            url: as the cache names it.
            pointer: what is known of it.
        """
        layout, suffix = self._node.layout, suffix_of(url)
        descriptor = self._lease(layout.object(pointer.key, suffix), pointer.size)
        if descriptor is None:
            return None
        return Lease(layout.object_path(pointer.key, suffix), pointer.key, descriptor, self._node.owner)

    def forget(self) -> None:
        """Look everything up again."""
        self._known.clear()

    def _look_up(self, given: str) -> _Known | None:
        url = local_path(given) or given
        pointer = self._node.filling.pointer(url)
        if pointer is None or pointer.checked < self._since:
            return None
        path = self._node.layout.object_path(pointer.key, suffix_of(url))
        known = _Known(path, str(path), pointer.key, pointer.size)
        if url == given:  # else it may mean another file later: of a relative path nobody knows
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[url] = known
        return known

    def _lease(self, path: str, size: int) -> int | None:
        try:
            return lease(path, size)
        except OSError as error:
            self._node.trouble(DiskTrouble(str(error)))
            return None
