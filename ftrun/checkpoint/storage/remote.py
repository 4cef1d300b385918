"""Storage behind a URL, through fsspec: object stores above all.

Object stores show a file when it is whole, and never half of it. Nothing is renamed, no listing is taken from a cache,
and what was written is looked at before it counts: some stores say yes and keep less.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ftrun.checkpoint.storage import requests
from ftrun.checkpoint.storage.drivers import BUCKETS, connect
from ftrun.checkpoint.storage.retry import Life, Patience, persist

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from ftrun.checkpoint.storage.base import Source

    T = TypeVar("T")

_GRANULE = 16 * 2**20
_PASSWORD = re.compile(r"(?<=://)[^/@]*:[^/@]*@")


class RemoteStorage:
    """A place behind a URL. Nothing is asked of it before the first verb.

    Args:
        url: as fsspec reads it, ``s3://bucket/some/where``.
        options: what the driver is given besides the URL.
        patience: how long verbs try.

    Raises:
        UsageError: no driver reads such a URL, or it isn't installed.
    """

    remote = True

    def __init__(self, url: str, options: Mapping[str, Any], patience: Patience) -> None:
        protocol, mark, place = url.partition("://")
        self._given, self._options, self._patience = f"{protocol}{mark}{place.rstrip('/')}", dict(options), patience
        self._connection = self._connect()

    @property
    def url(self) -> str:
        """The URL, without a password."""
        return _PASSWORD.sub("", self._given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def local(self, key: str) -> None:
        """There is no plain path."""

    def names(self, directory: str) -> list[str]:
        """Names directly within a directory."""
        found = self._do("listing", directory, lambda files, path, _: files.ls(path, detail=False), missing=None)
        if found is None:
            self._require_bucket()
            return []
        top = self._place()[1]
        ends = (str(name).rstrip("/") for name in found)
        return [name.rpartition("/")[2] for name in ends if name not in (top, f"{top}/{directory}")]

    def tree(self, directory: str) -> dict[str, int]:
        """Sizes of all files below a directory, in one listing."""
        nothing: dict[str, Any] = {}
        found = self._do("listing", directory, lambda files, path, _: files.find(path, detail=True), missing=nothing)
        prefix = f"{self._place()[1]}/{directory}/"
        return {
            name.removeprefix(prefix): int(entry["size"])
            for name, entry in found.items()
            if name.startswith(prefix) and entry["type"] == "file"
        }

    def size(self, key: str) -> int | None:
        """Size of a file."""
        entry = self._do("looking for", key, lambda files, path, _: files.info(path), missing=None)
        return int(entry["size"]) if entry is not None and entry["type"] == "file" else None

    def read(self, key: str) -> bytes:
        """All bytes of a small file."""
        return bytes(self._do("reading", key, lambda files, path, _: files.cat_file(path)))

    @contextlib.contextmanager
    def opened(self, key: str) -> Iterator[RemoteFile]:
        """A file for reading ranges of it; nothing is asked before the first one."""
        yield RemoteFile(self, key)

    def read_range(self, key: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of a file from ``offset`` on, in one request.

        Raises:
            EOFError: the file ends before.
        """
        last = offset + len(view)
        try:
            data = self._do("reading", key, lambda files, path, _: files.cat_file(path, start=offset, end=last))
        except OSError as error:
            # A range behind the end is an error to some stores.
            if error.errno == errno.EINVAL and (self.size(key) or 0) < last:
                raise EOFError(f"{self.url}/{key} ends before byte {last}") from error
            raise
        if len(data) != len(view):
            raise EOFError(f"{self.url}/{key} ends before byte {last}")
        view[:] = data

    def create(self, key: str, data: bytes) -> None:
        """Create a small file, exclusively where the store can, and see who won."""
        tries = 0

        def run(files: Any, path: str, life: Life) -> None:
            nonlocal tries
            tries += 1
            # Looked up first: a store without conditional writes would replace what is there.
            if not requests.exists(files, path):
                life.beat()
                requests.create(files, path, data)
            elif tries == 1:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.url}/{key}")
            # Otherwise an earlier try of ours may have arrived although its answer did not.
            self._require_same(files, path, data)

        self._prepare(key)
        self._do("creating", key, run)

    def write(self, key: str, data: bytes) -> None:
        """Write or replace a small file."""

        def run(files: Any, path: str, _: Life) -> None:
            files.pipe_file(path, data)
            self._require_same(files, path, data)

        self._prepare(key)
        self._do("writing", key, run)

    def put(self, key: str, source: Source, size: int) -> None:
        """Create a large file; each try starts again from its first byte."""
        tries = 0

        def run(files: Any, path: str, life: Life) -> None:
            nonlocal tries
            tries += 1
            if tries == 1 and requests.exists(files, path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.url}/{key}")
            try:
                requests.upload(files, path, source, size, life)
            except Exception:
                self._remove_remains(files, path, life)
                raise
            files.invalidate_cache()
            kept = int(files.info(path)["size"])
            if kept != size:
                raise OSError(errno.EIO, f"the store kept {kept} of {size} bytes")

        self._prepare(key)
        try:
            self._do("writing", key, run)
        except requests.SourceFailed as error:
            raise error.__cause__ or error from None

    def delete(self, keys: Collection[str]) -> None:
        """Delete files, many in a request where the driver can."""

        def run(files: Any, top: str, life: Life) -> None:
            paths = [f"{top}/{key}" for key in keys]
            if len(paths) > 1 and files.async_impl and not any(set(path) & set("*?[") for path in paths):
                with contextlib.suppress(FileNotFoundError):
                    files.rm(paths)
                    return
            for path in paths:
                life.beat()
                with contextlib.suppress(FileNotFoundError):
                    files.rm_file(path)

        if keys:
            self._do("deleting", "", run, missing=None)

    def make_directory(self, directory: str) -> None:
        """Nothing to do: directories come with their files."""

    def sync_directory(self, directory: str) -> None:
        """Nothing to do: what a store has taken is durable."""

    def remove_directories(self, directories: Iterable[str]) -> None:
        """Remove empty directories where the store has such things."""
        if self._protocol in BUCKETS:
            return
        once = replace(self._patience, deadline=0.0)  # most often it is not empty
        for directory in directories:
            with contextlib.suppress(OSError):
                self._do("removing", directory, lambda files, path, _: files.rmdir(path), once)

    def abort_uploads(self, directory: str) -> None:
        """Drop the parts of unfinished uploads, on S3."""
        if self._protocol not in ("s3", "s3a"):
            return

        def run(files: Any, path: str, life: Life) -> None:
            bucket, _, prefix = path.partition("/")
            found = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            for upload in found.get("Uploads", []):
                life.beat()
                files.abort_mpu(bucket, upload["Key"], upload["UploadId"])

        self._do("dropping unfinished uploads in", directory, run, missing=None)

    @property
    def _protocol(self) -> str:
        return self._given.partition("://")[0]

    def _connect(self) -> tuple[int, Any, str]:
        return (os.getpid(), *connect(self._given, self._options))

    def _place(self) -> tuple[Any, str]:
        # The loop on which drivers work doesn't survive a fork.
        if self._connection[0] != os.getpid():
            self._connection = self._connect()
        return self._connection[1:]

    def _do(
        self,
        verb: str,
        key: str,
        call: Callable[[Any, str, Life], T],
        patience: Patience | None = None,
        **missing: T,
    ) -> T:
        """Ask the store with patience. With ``missing``, that is the answer where there is no such file."""
        what = f"{verb} {self.url}/{key}".rstrip("/")

        def run(life: Life) -> T:
            files, top = self._place()
            files.invalidate_cache()
            try:
                return call(files, f"{top}/{key}" if key else top, life)
            except Exception as error:  # drivers raise what they like
                clearer = requests.translated(error, what)
                if clearer is error:
                    raise
                raise clearer from error

        try:
            return persist(run, patience or self._patience, what)
        except (FileNotFoundError, NotADirectoryError):
            if not missing:
                raise
            return missing["missing"]

    def _prepare(self, key: str) -> None:
        """Make the directory of a key, where a store has directories. One would make buckets too, by mistake."""
        parent = key.rpartition("/")[0]
        if self._protocol not in BUCKETS:
            self._do("making", parent, lambda files, path, _: files.makedirs(path, exist_ok=True))

    def _remove_remains(self, files: Any, path: str, life: Life) -> None:
        """Where a store shows files while they grow, take away what a failed try of ours has left."""
        if self._protocol not in BUCKETS:
            with contextlib.suppress(Exception):  # the try has failed already
                life.beat()  # a try that was left behind has no say any more
                files.rm_file(path)

    def _require_bucket(self) -> None:
        """Tell an empty place from none at all, which a listing doesn't."""
        if self._protocol not in BUCKETS:
            return
        bucket = self._place()[1].partition("/")[0]
        with contextlib.suppress(PermissionError):  # who may list a part of it needn't see the whole
            if not self._do("looking for", "", lambda files, _path, _life: files.exists(bucket), missing=False):
                raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket!r}", self.url)

    def _require_same(self, files: Any, path: str, data: bytes) -> None:
        """What lies there now says who won, and whether the store keeps what it is given.

        Raises:
            FileExistsError: something else lies there.
            OSError: less than was written.
        """
        files.invalidate_cache()
        kept = bytes(files.cat_file(path))
        if kept == data:
            return
        if data.startswith(kept):
            raise OSError(errno.EIO, f"the store kept {len(kept)} of {len(data)} bytes")
        raise FileExistsError(errno.EEXIST, "was written by somebody else at the same time", path)


class RemoteFile:
    """A file for reading ranges of it.

    Args:
        storage: where it lies.
        key: its key.
    """

    granule = _GRANULE  # a request costs time, however little it asks for

    def __init__(self, storage: RemoteStorage, key: str) -> None:
        self._storage, self._key = storage, key

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""
        for start in range(0, len(view), self.granule):
            self._storage.read_range(self._key, offset + start, view[start : start + self.granule])
