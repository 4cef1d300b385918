"""Getting one file into the cache: ask the remote where that is due, take what is there, download what isn't."""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import crc32c

from ftrun.data.cache import eviction, names, patient
from ftrun.data.cache.refusals import DiskTrouble, Outdated, RemoteError, RemoteFileMissing
from ftrun.data.cache.remote import CHUNK

if TYPE_CHECKING:
    from ftrun.data.cache.names import Pointer
    from ftrun.data.cache.node import Node
    from ftrun.data.cache.records import Listing


@dataclass(frozen=True)
class Obtained:
    """What came of it.

    Attributes:
        kind: as in :class:`~ftrun.data.cache.records.Fetched`.
        pointer: to the object; None where there is none.
        size: bytes; 0 where nobody knows.
        waited: somebody else has downloaded it meanwhile.
    """

    kind: Literal["hit", "filled", "bypassed"]
    pointer: Pointer | None
    size: int
    waited: bool = False


@dataclass(frozen=True)
class Obtaining:
    """Gets files.

    Attributes:
        node: the cache.
        since: what was learned of remotes before this time is asked again.
        attempts: at a file that changes again and again.
        thorough: also large files are compared with their checksums, as a run touches them first.
    """

    node: Node
    since: float
    attempts: int
    thorough: bool = False

    def obtain(self, url: str) -> Obtained:
        """Get a file.

        Raises:
            RemoteError: it isn't there, or isn't to be had.
        """
        filling = self.node.filling
        known = filling.pointer(url)
        if known is not None and known.checked >= self.since and filling.is_there(url, known):
            return Obtained("hit", known, known.size)
        for _ in range(self.attempts):
            asked = time.time()
            try:
                listing = self.node.copying.look(url)
            except RemoteFileMissing:
                raise
            except RemoteError as error:
                return self._unasked(url, known, error)
            if known is not None and self.is_same(url, known, listing) and self._is_sound(url, known):
                return Obtained("hit", self.confirm(url, known, asked), known.size)
            with contextlib.suppress(Outdated):
                return self._bring(url, listing)
        raise RemoteError(f"{url} changes faster than it can be downloaded; wait until whoever writes it is done")

    def is_same(self, url: str, known: Pointer, listing: Listing) -> bool:
        """Whether the object that we have is what the remote has. Read whole, where the machine started since."""
        if known.key != names.key_of(url, listing) or not self.node.filling.is_there(url, known, listing.size):
            return False
        path = self.node.layout.object(known.key, names.suffix_of(url))
        return known.checked >= self.node.boot or checksum(path) == known.crc

    def _is_sound(self, url: str, known: Pointer) -> bool:
        """Compare a file with its checksum, as a run touches it first: it is read next anyway.

        A large one only where nobody waits for it.
        """
        if known.size > CHUNK and not self.thorough:
            return True
        path = self.node.layout.object(known.key, names.suffix_of(url))
        found = checksum(path)
        if found is None or found == known.crc:
            return True
        words = f"{url}: its copy in the data cache is damaged (CRC32C {found:08x} instead of {known.crc:08x})"
        warnings.warn(f"{words}. It is fetched again; `ftrun cache verify` looks at all", RuntimeWarning, stacklevel=2)
        with contextlib.suppress(DiskTrouble), self.node.books.held() as account:
            account.total -= eviction.evict(eviction.Candidate(0.0, 2**62, known.size, path)) or 0
        return False

    def confirm(self, url: str, known: Pointer, asked: float) -> Pointer:
        """Write down that the remote still has what we have."""
        self.node.page.add("rechecks")
        confirmed = known._replace(checked=asked)
        with contextlib.suppress(DiskTrouble), self.node.books.held():
            self.node.filling.point(url, confirmed)
        return confirmed

    def _unasked(self, url: str, known: Pointer | None, error: RemoteError) -> Obtained:
        """The remote doesn't answer: what we have from before is better than a dead rank."""
        if known is None or known.checked < self.node.boot or not self.node.filling.is_there(url, known):
            raise error
        warnings.warn(f"{error}. The copy of an earlier run is used unchecked", RuntimeWarning, stacklevel=2)
        return Obtained("hit", known, known.size)

    def _bring(self, url: str, listing: Listing) -> Obtained:
        try:
            return self._filled(url, listing)
        except DiskTrouble as error:
            trouble = error
        try:
            self.node.mend(trouble)
            return self._filled(url, listing)
        except DiskTrouble as error:
            self.node.trouble(error)
            return Obtained("bypassed", None, listing.size or 0)

    def _filled(self, url: str, listing: Listing) -> Obtained:
        # Out of descriptors is nobody's fault for long: other threads give some back.
        pointer, ours = patient.persist(url, lambda: self.node.filling.bring(url, listing), self.node.copying.patience)
        return Obtained("filled" if ours else "hit", pointer, pointer.size, waited=not ours)


def checksum(path: str) -> int | None:
    """The CRC32C of a local file; None where it can't be read."""
    crc = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while data := file.read(CHUNK):
                crc = crc32c.crc32c(data, crc)
    except OSError:
        return None
    return crc
