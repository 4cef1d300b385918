"""``CachedFiles``: remote files as local paths, once per node."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.data.cache import checking, eviction, past, settings, told
from ftrun.data.cache.ahead import Ahead
from ftrun.data.cache.hits import Hits
from ftrun.data.cache.layout import Layout
from ftrun.data.cache.node import Node, Plan, start, watch_forks
from ftrun.data.cache.obtaining import Obtaining
from ftrun.data.cache.pages import node_counters
from ftrun.data.cache.records import CachedObject, Counters, Fetched, Patience
from ftrun.data.cache.refusals import DiskTrouble
from ftrun.data.cache.remote import Remote, local_path
from ftrun.data.cache.sweeping import sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ftrun.data.cache.leases import Lease

_AHEAD = 4 << 30


class CachedFiles:
    """Remote files on a local disk: fetched once per node, whatever the number of its processes and threads.

    ``with files.open("s3://bucket/a.jpg") as path:`` gives a local path that stays where it is until the block ends.
    What is asked for twice is downloaded once; the least recently used files go when the limit or the disk asks for it;
    after a restart, and for the next job, everything is still there. When the disk is full or read-only, files are
    read past the cache: it never fails a rank.

    A remote file that changes is another object. A run notices it the first time that it touches the file: what was
    learned before the run began is asked again (one request per file, or per directory with :meth:`revalidate`), what
    was learned since is trusted until the run ends, through all its restarts.

    Picklable, and usable from any thread and from forked or spawned processes. It opens nothing before its first use.

    Attributes:
        root: directory of the cache.
        limit: bytes that it may take; None for no limit but free space. Of several jobs that use a root, the smallest
            limit holds for all as long as that job runs.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        limit: int | str | None = None,
        reserve_free: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        trust: float = 0.0,
        patience: Patience | None = None,
    ) -> None:
        """Say what to use; nothing is made or opened yet.

        Args:
            root: directory on a local disk; left out, the job's (``data.cache``), ``$FTRUN_CACHE`` or
                ``~/.cache/ftrun/data``.
            limit: ``"200GB"``, ``"1.5TiB"`` or bytes; left out, the job's (``data.limit``) where ``root`` is left out.
            reserve_free: free space to leave on the disk, a share or a size; left out, the job's or 10 %.
            storage_options: for the URLs' fsspec drivers.
            trust: seconds before the run's start since when the answers of remotes still count. With a day, the next
                job of that day asks the remote for nothing that is there, and doesn't notice what changed meanwhile.
            patience: with remotes that are slow or don't answer.

        Raises:
            UsageError: a size that is none, or a root where no cache may lie (NFS, FUSE, somebody else's, another
                version's).
        """
        found = settings.read(os.environ, root)
        self.root = found.root
        self.limit = settings.size_in_bytes(limit)
        if root is None and limit is None:
            self.limit = found.limit
        self._reserve = found.reserve if reserve_free is None else reserve_free
        settings.reserve_of(self._reserve, 0)
        self._remote = Remote(storage_options)
        self._since = found.since - trust
        self._patience = patience or Patience()
        Layout(self.root).check()
        self._prepare()

    def open(self, url: str) -> AbstractContextManager[Path]:
        """A local path with a file's bytes, for a ``with`` block.

        Args:
            url: a URL that fsspec reads, or a path, on a slow mount for example.

        Raises:
            RemoteError: the file isn't there, or isn't to be had; it is FileNotFoundError, too, where it isn't there.
        """
        return self.get(url)

    def get(self, url: str) -> Lease:
        """As :meth:`open`, for those who release the lease themselves."""
        hits = self._hits or self._begun()
        return hits.get(url) or self._get_slowly(local_path(url) or url, hits)

    def peek(self, urls: Sequence[str]) -> list[Lease | None]:
        """As :meth:`get` for some files, but None for those that would have to be waited for."""
        return (self._hits or self._begun()).get_all(urls)

    def prefetch(self, urls: Iterable[str]) -> None:
        """Fetch these files in the background, in their order, a bounded way ahead of this process's reads.

        A hint: errors are left to whoever reads the file. Call it in the process that reads; jobs started by ``ftrun``
        need it not, as their node's filler knows what is read next.
        """
        if not self._node:
            self._start()
        self._ahead.follow(urls)

    def fetch(self, url: str, *, thorough: bool = False) -> Fetched:
        """Bring a file in without a lease.

        Args:
            url: of the file.
            thorough: compare it with its checksum, too, however large it is, where it is here from before the run.

        Raises:
            RemoteError: the file isn't there, or isn't to be had.
        """
        url = local_path(url) or url
        obtaining = Obtaining(self._node or self._start(), self._since, self._patience.attempts, thorough)
        obtained = obtaining.obtain(url)
        if obtained.kind == "bypassed":
            return Fetched("bypassed", "", obtained.size)
        assert obtained.pointer is not None
        return Fetched(obtained.kind, obtained.pointer.key, obtained.size)

    def has(self, url: str) -> bool:
        """Whether a file is there and needs no question to the remote."""
        url = local_path(url) or url
        filling = (self._node or self._start()).filling
        pointer = filling.pointer(url)
        return pointer is not None and pointer.checked >= self._since and filling.is_there(url, pointer)

    def revalidate(self, urls: Iterable[str]) -> int:
        """Ask the remote whether files that are here from before the run are still the same; one request a directory.

        Returns:
            How many have changed. They are fetched again when they are used.
        """
        node, hits = self._node or self._start(), self._begun()
        hits.forget()
        return checking.revalidate(node, [local_path(url) or url for url in urls], self._since)

    def cached(self) -> Iterator[CachedObject]:
        """What lies in the cache, in no order."""
        layout = Layout(self.root)
        for shard in eviction.shards(layout):
            yield from eviction.objects(layout, shard)

    def make_room(
        self, needed: int, next_use: Callable[[Sequence[CachedObject]], Sequence[float]] | None = None
    ) -> int:
        """Evict until ``needed`` more bytes fit. Call it for a good many files at once: it looks at all objects.

        Args:
            needed: bytes.
            next_use: when objects are used next, in any unit that grows with time; called several times with a part of
                the objects each, while no lock is held. The furthest go first; infinity means never, minus infinity
                that it must stay. Left out, the least recently used go first.

        Returns:
            Bytes that fit now; 0 where the cache can't be used.
        """
        node = self._node or self._start()
        try:
            return self._make_room(node, needed, next_use)
        except DiskTrouble as error:
            node.trouble(error)
            return 0

    def counters(self, *, node: bool = False) -> Counters:
        """What has happened in this process; with ``node``, in all processes of this user since the cache was made."""
        if node:
            return node_counters(Layout(self.root).pages)
        return self._node.page.counters() if self._node else Counters()

    def sweep(self) -> None:
        """Remove what killed processes have left. Done whenever a process begins to use the cache."""
        node = self._node or self._start()
        with contextlib.suppress(DiskTrouble), node.books.held() as account:
            sweep(node.layout, account)

    def spec(self) -> dict[str, Any]:
        """What another process needs to use the same files in the same way, as JSON has it."""
        return {
            "root": str(self.root),
            "limit": self.limit,
            "reserve_free": self._reserve,
            "storage_options": self._remote.storage_options,
            "since": self._since,
            "patience": asdict(self._patience),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> CachedFiles:
        """Back from :meth:`spec`."""
        made = cls.__new__(cls)
        made.__setstate__(dict(spec))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.spec()

    def __setstate__(self, spec: dict[str, Any]) -> None:
        self.root = Path(spec["root"])
        self.limit = spec["limit"]
        self._reserve = spec["reserve_free"]
        self._remote = Remote(spec["storage_options"])
        self._since = spec["since"]
        self._patience = Patience(**spec["patience"])
        self._prepare()

    def _prepare(self) -> None:
        """As a new process has it: nothing open."""
        self._node: Node | None = None
        self._hits: Hits | None = None
        self._guard = threading.Lock()
        self._ahead = Ahead(self.fetch, min(_AHEAD, (self.limit or _AHEAD) // 4))

    def _start(self) -> Node:
        with self._guard:
            if self._node is None:
                node = start(Plan(self.root, self.limit, self._reserve, self._patience), self._remote)
                watch_forks(node, self)
                # What was written before the machine went down may not have reached the disk: look at it again.
                self._since = max(self._since, node.boot)
                self._hits = Hits(node, self._since, self._ahead)
                told.tell(os.environ, node, self.limit)
                self._node = node  # last: other threads see it without the guard
            return self._node

    def _begun(self) -> Hits:
        self._start()
        assert self._hits is not None
        return self._hits

    def in_child(self) -> None:
        """Called in a forked child: what is open belongs to the parent."""
        self._remote.forget()
        self._prepare()

    def _get_slowly(self, url: str, hits: Hits) -> Lease:
        node, began = self._start(), time.monotonic()
        try:
            for _ in range(3):  # what was brought in may be evicted before we have a lease on it
                obtained = Obtaining(node, self._since, self._patience.attempts).obtain(url)
                found = hits.lease(url, obtained.pointer) if obtained.pointer else None
                if found is not None:
                    node.page.add("hits" if obtained.kind == "hit" and not obtained.waited else "misses")
                    return found
                if obtained.pointer is None:
                    break
            return past.read_past(node, url)
        finally:
            node.page.add("wait_seconds", time.monotonic() - began)
            self._ahead.read(url)

    def _make_room(
        self, node: Node, needed: int, next_use: Callable[[Sequence[CachedObject]], Sequence[float]] | None
    ) -> int:
        with node.books.held() as account:
            needed = min(needed, node.room.limit())
            if next_use is None:
                node.room.make(account, needed, again=True)
            left = node.room.left(account)
        while left < needed and next_use is not None:
            candidates = eviction.furthest(node.layout, next_use)
            with node.books.held() as account:
                node.room.make_by(account, needed, candidates)
                before, left = left, node.room.left(account)
            if left <= before:
                break
        return left
