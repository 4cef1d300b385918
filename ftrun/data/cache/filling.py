"""One download: claim, reserve room, copy, give the object its name."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftrun.data.cache import eviction, names, regular
from ftrun.data.cache.claims import Claim, claim
from ftrun.data.cache.layout import knows_no_allocation
from ftrun.data.cache.leases import is_whole
from ftrun.data.cache.names import Pointer
from ftrun.data.cache.refusals import OUT_OF_DESCRIPTORS, DiskTrouble, OnTheDisk, Outdated

if TYPE_CHECKING:
    from ftrun.data.cache.books import Books
    from ftrun.data.cache.copying import Copying
    from ftrun.data.cache.layout import Layout
    from ftrun.data.cache.pages import Page
    from ftrun.data.cache.records import Listing
    from ftrun.data.cache.room import Room


@dataclass(frozen=True)
class Filling:
    """Brings remote files into the cache. Any thread may call it.

    Attributes:
        layout: where things lie.
        books: the cache's lock and sum.
        room: what fits.
        copying: from the remote.
        page: the process's counters.
        held: descriptors of downloads in progress, which a forked child must close.
        boot: when the machine started; objects from before that are not taken for whole by their size.
    """

    layout: Layout
    books: Books
    room: Room
    copying: Copying
    page: Page
    held: set[int]
    boot: float

    def bring(self, url: str, listing: Listing) -> tuple[Pointer, bool]:
        """Make an object of a remote file, unless somebody else does. Returns its pointer, and whether we did.

        Raises:
            DiskTrouble: there is no room, or the disk doesn't take it.
            RemoteError: the remote doesn't give the file.
            Outdated: it isn't the file of that listing any more.
        """
        key = names.key_of(url, listing)

        def arrived() -> bool:
            pointer = self.pointer(url)
            if pointer is None or pointer.key != key or pointer.checked < self.boot:
                return False
            return self.is_there(url, pointer, listing.size)

        with OnTheDisk():
            got = claim(self.layout.temp(key), self.copying.patience.stopped, self.books, arrived)
        waited = got.waited if isinstance(got, Claim) else got
        if waited:
            self.page.add("waits")
        if isinstance(got, Claim):
            self.held.add(got.descriptor)
            try:
                if not arrived():
                    return self._download(url, key, listing, got), True
                with OnTheDisk():
                    got.drop(self.books)
            finally:
                self.held.discard(got.descriptor)
                got.close()
        pointer = self.pointer(url)
        if pointer is None or pointer.key != key:
            raise Outdated(url)
        return pointer, False

    def pointer(self, url: str) -> Pointer | None:
        """What is known of a URL."""
        try:
            return Pointer.decode(os.readlink(self.layout.pointer(names.slot_of(url))))
        except OSError:
            return None

    def is_there(self, url: str, pointer: Pointer, size: int | None = None) -> bool:
        """Whether the object is there and has its size: that of the pointer, and of the listing where it has one."""
        path = self.layout.object(pointer.key, names.suffix_of(url))
        return size in (None, pointer.size) and is_whole(path, pointer.size)

    def point(self, url: str, pointer: Pointer) -> None:
        """Write down what is known of a URL. The caller holds the cache's lock."""
        target = self.layout.pointer(names.slot_of(url))
        new = f"{self.layout.temps}/pointer"
        try:
            os.symlink(pointer.encode(), new)
        except FileExistsError:  # its writer was killed
            os.unlink(new)
            os.symlink(pointer.encode(), new)
        _rename(new, target)

    def _download(self, url: str, key: str, listing: Listing, ours: Claim) -> Pointer:
        asked = time.time()
        copying = self.copying
        if ours.waited > copying.patience.timeout:  # whoever was before us has had patience enough
            copying = replace(copying, patience=replace(copying.patience, attempts=1))
        try:
            if listing.size:
                with OnTheDisk():
                    self._reserve(ours, listing.size)
                    _allocate(ours.descriptor, listing.size)
            size, crc = copying.copy(url, listing, _Temp(self, ours))
            pointer = Pointer(key, size, crc, asked)
            with OnTheDisk():
                self._commit(url, pointer, ours)
        except BaseException:
            with contextlib.suppress(DiskTrouble), OnTheDisk():  # what is left of it, the next sweep finds
                ours.drop(self.books)
            raise
        return pointer

    def _reserve(self, ours: Claim, size: int) -> None:
        with self.books.held() as account:
            fits = ours.reserve(account, self.room, size)
        if not fits:
            raise DiskTrouble(f"no room for {size} bytes")

    def _commit(self, url: str, pointer: Pointer, ours: Claim) -> None:
        target = self.layout.object(pointer.key, names.suffix_of(url))
        with self.books.held() as account:
            if not ours.reserve(account, self.room, pointer.size):  # in case that nobody knew the size before
                raise DiskTrouble(f"no room for {pointer.size} bytes")
            self._remember(url, pointer)
            account.total -= eviction.size_of(target)  # a broken one
            self.point(url, pointer)  # first: whoever finds no temporary file any more must find the object
            _rename(ours.path, target)
            # At once: who is killed in between leaves a file that nobody has counted.
            self.page.add("fills")
            self.page.add("bytes", pointer.size)
            ours.give()
        os.fchmod(ours.descriptor, 0o400)  # last: who takes over a temporary file must be able to write to it

    def _remember(self, url: str, pointer: Pointer) -> None:
        # A line break before it, too: what a full disk has cut off must not take the next line with it.
        line = f"\n{pointer.key} {pointer.crc:08x} {json.dumps(url)}\n".encode()
        try:
            regular.append(self.layout.index(pointer.key[:2]), line)
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                raise
            # Otherwise it is an object whose origin `ftrun cache ls` can't name.


@dataclass(frozen=True)
class _Temp:
    """A claim's file, as the target of a copy."""

    filling: Filling
    claim: Claim

    @property
    def descriptor(self) -> int:
        return self.claim.descriptor

    def beat(self) -> None:
        self.claim.beat()

    def grow(self, size: int) -> None:
        with OnTheDisk():
            self.filling._reserve(self.claim, size)


def _allocate(descriptor: int, size: int) -> None:
    """Take the space of a file whose size is known, so that a full disk shows before the download."""
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if not knows_no_allocation(error):
            raise


def _rename(old: str, new: str) -> None:
    try:
        os.rename(old, new)
    except (FileNotFoundError, NotADirectoryError):
        regular.make_directory(os.path.dirname(new))
        os.rename(old, new)
